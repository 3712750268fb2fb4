"""What a teacher gives its student, and what a delay of the teacher costs."""
