import pytest
from openai import AuthenticationError

ROUTES = [
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/v1/generate"),
    ("POST", "/tokenize"),
    ("POST", "/update_weights"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/nothing/here"),
]


async def test_every_route_but_health_asks_for_the_key(serve, make_backend):
    async with serve(make_backend(), key="s3cret") as running:
        del running.http.headers["Authorization"]
        for method, route in ROUTES:
            answer = await running.http.request(method, route)
            assert (route, answer.status_code) == (route, 401)
            assert answer.json()["error"]["type"] == "AuthenticationError"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await running.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "given", ["Bearer wrong", "Bearer s3cret2", "s3cret", "Basic s3cret", "Bearer", "Bearer  s3cret"]
)
async def test_a_wrong_key_is_refused(serve, make_backend, given):
    async with serve(make_backend(), key="s3cret") as running:
        answer = await running.http.get("/v1/models", headers={"Authorization": given})
    assert answer.status_code == 401


async def test_the_key_opens_every_route_to_the_stock_client(serve, make_backend):
    async with serve(make_backend(), key="s3cret") as running:
        assert (await running.openai.models.list()).data
        with pytest.raises(AuthenticationError):
            await running.openai.with_options(api_key="other").models.list()


async def test_a_server_without_key_asks_for_none(serve, make_backend):
    async with serve(make_backend()) as running:
        assert (await running.http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("given", ["Bearer s3cret", "bearer s3cret"])
async def test_the_key_is_accepted_with_the_scheme_in_any_case(serve, make_backend, given):
    async with serve(make_backend(), key="s3cret") as running:
        answer = await running.http.get("/v1/models", headers={"Authorization": given})
    assert answer.status_code == 200


async def test_a_wrong_method_is_told_the_right_one(serve, make_backend):
    async with serve(make_backend()) as running:
        answer = await running.http.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
