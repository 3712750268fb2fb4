"""Complete tasks: models, data, losses and metrics, put together by TOML recipes."""
