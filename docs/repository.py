"""The site's link to the repository, which pyproject.toml names: a hook of MkDocs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    project = tomllib.loads((Path(config["config_file_path"]).parent / "pyproject.toml").read_text())[
        "project"
    ]
    if where := project.get("urls", {}).get("Repository"):
        config["repo_url"], config["repo_name"] = where, project["name"]
    return config
