"""What forwards in a pipeline's bubbles cost the pipeline, and what they do."""
