"""How Sphinx builds these pages: `make docs`, where a warning is an error."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extension"))

project = "hocket"
author = "the hocket authors"
release = version_of("hocket")
version = release

extensions = ["myst_parser", "public_names", "commands", "catalogues"]
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "extension"]
python_maximum_signature_line_length = 80

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["hocket.css"]
html_title = f"hocket {release}"
html_copy_source = False
html_show_copyright = False
