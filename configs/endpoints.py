"""The endpoints of `endpoints.toml`, as the table in Python that evaluation tools used to read."""

import tomllib
from pathlib import Path

ENDPOINTS = {
    endpoint["endpoint_id"]: {key: endpoint[key] for key in ("model", "url", "key")}
    for endpoint in tomllib.loads(Path(__file__).with_name("endpoints.toml").read_text(encoding="utf-8"))["endpoint"]
}
