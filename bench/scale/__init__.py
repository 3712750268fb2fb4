"""What grows with the number of workers, and how long plans for 1,024 devices take."""
