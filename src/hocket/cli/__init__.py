"""The command line. Nothing heavy is imported until a command runs.

May import everything, but what imports torch inside of functions. Begin with `main.py`;
each command has a file.
"""
