"""Whoever has no key gets nothing but the server's health."""

import pytest

ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/weights"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/v1/generate"),
    ("POST", "/tokenize"),
    ("POST", "/update_weights"),
    ("POST", "/reload_weights"),
    ("POST", "/init_weight_transfer"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/route"),
]
WRONG = {
    "none": None,
    "another": "Bearer s3cre",
    "longer": "Bearer s3crets",
    "another-scheme": "Basic s3cret",
    "bare": "s3cret",
    "empty": "Bearer",
    "not-ascii": "Bearer s\u00e9cret",
}


@pytest.mark.parametrize(("method", "route"), ROUTES, ids=[route for _, route in ROUTES])
async def test_every_route_but_health_asks_for_the_key(http, method, route):
    del http.headers["Authorization"]
    assert (await http.get("/health")).status_code == 200
    for name, value in WRONG.items():
        headers = [] if value is None else [(b"Authorization", value.encode("latin-1"))]
        answer = await http.request(method, route, headers=headers)
        assert answer.status_code == 401, name
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("AuthenticationError", 401, None)
        assert "key" in error["message"]
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_the_scheme_is_read_in_any_case(http):
    del http.headers["Authorization"]
    assert (await http.get("/v1/models", headers={"Authorization": "bearer s3cret"})).status_code == 200
