"""Llama 3.1 by torchtitan on H100s, predicted beside what its authors measured."""
