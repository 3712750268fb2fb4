"""Cut any module into stages, and measure its layers."""
