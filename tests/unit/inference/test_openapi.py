import json
import re

from prime_rl.inference.app import build_app
from prime_rl.inference.openapi import MESSAGES, document
from prime_rl.transport.api import GenerateRequest


async def test_the_document_has_every_route_and_every_reference_leads_somewhere(serve, make_backend):
    async with serve(make_backend()) as running:
        text = (await running.http.get("/openapi.json")).text
        paths = json.loads(text)["paths"]
        routes = {route.path for route in build_app(running.service, None).routes}
    assert paths.keys() == routes
    assert MESSAGES.keys() <= routes
    schemas = json.loads(text)["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) <= schemas.keys()
    assert set(schemas["GenerateRequest"]["properties"]) == set(GenerateRequest.model_fields)
    assert all(operation["summary"] for path in paths.values() for operation in path.values())


async def test_the_ranges_that_a_request_must_keep_are_told(serve, make_backend):
    async with serve(make_backend()) as running:
        fields = (await running.http.get("/openapi.json")).json()["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"type": "number", "minimum": 0.0, "maximum": 2.0} in fields["temperature"]["anyOf"]
    assert fields["messages"]["minItems"] == 1


def test_a_document_can_be_made_of_no_routes():
    assert document(())["paths"] == {}
