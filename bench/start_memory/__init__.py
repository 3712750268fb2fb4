"""How much memory and time a start takes, of a model that no worker holds whole."""
