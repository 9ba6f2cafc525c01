import pytest

from prime_rl.inference.vllm.bodies import ObjectsOnly

ROUTE = "/v1/completions"


async def asked(*parts, path=ROUTE, method="POST"):
    """What the application got of a body in these parts, or None, and the status of an answer that is not its own."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1]["more_body"] = False
    got, sent = [], []

    async def app(scope, receive, send):
        while True:
            message = await receive()
            got.append(message["body"])
            if not message["more_body"]:
                return

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    await ObjectsOnly(app)({"type": "http", "method": method, "path": path, "headers": []}, receive, send)
    return b"".join(got) if got else None, sent[0]["status"] if sent else None


@pytest.mark.parametrize(
    "parts", [[b"[]"], [b'"x"'], [b"null"], [b" \n", b"", b"  [1]"], [b"-1"], [b"NaN"], [b"Infinity"], [b"[" * 5000]]
)
async def test_another_value_than_an_object_is_refused(parts):
    assert await asked(*parts) == (None, 400)


@pytest.mark.parametrize("parts", [[b"{}"], [b" ", b"\n{", b'"a": [1]}'], [b""], [b"", b"  "], [b"\xff\xfe"]])
async def test_everything_else_is_left_to_vllm_as_it_came(parts):
    assert await asked(*parts) == (b"".join(parts), None)


@pytest.mark.parametrize("where", [{"path": "/update_weights"}, {"method": "DELETE"}])
async def test_other_routes_and_methods_see_their_bodies(where):
    assert await asked(b"[]", **where) == (b"[]", None)


async def test_a_client_that_goes_away_in_the_middle_is_told_to_the_application():
    messages = [{"type": "http.request", "body": b" ", "more_body": True}, {"type": "http.disconnect"}]
    seen = []

    async def receive():
        return messages.pop(0)

    async def app(scope, receive, send):
        seen.extend([await receive(), await receive()])

    await ObjectsOnly(app)({"type": "http", "method": "POST", "path": ROUTE, "headers": []}, receive, None)
    assert [message["type"] for message in seen] == ["http.request", "http.disconnect"]
