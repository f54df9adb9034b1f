"""The site's link to the repository, which pyproject.toml names, and its version: a hook of MkDocs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    project = tomllib.loads((Path(config["config_file_path"]).parent / "pyproject.toml").read_text())[
        "project"
    ]
    if where := project.get("urls", {}).get("Repository"):
        config["repo_url"], config["repo_name"] = where, project["name"]
    text = (Path(__file__).parents[1] / "fp8moe" / "_version.py").read_text()
    (version,) = re.findall(r'__version__ = "(.*)"', text)
    config["copyright"] = f"fp8moe {version}, Apache License 2.0"  # in the footer of every page
    return config
