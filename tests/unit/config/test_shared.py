import pytest
from pydantic import ValidationError

from prime_rl.config.shared import ClientConfig

A, B = "http://a:1/v1", "http://b:1/v1"


def test_the_servers_are_those_behind_the_router_where_they_are_named():
    assert ClientConfig(base_url=(A, B)).servers == (A, B)
    assert ClientConfig(base_url=(A,), admin_base_url=(B,)).servers == (B,)
    assert ClientConfig.model_validate({"base_url": A, "admin_base_url": B}).servers == (B,)


@pytest.mark.parametrize("key", ["base_url", "admin_base_url"])
@pytest.mark.parametrize(
    ("value", "reason"), [((A, B, A), "stands twice"), ((), "needs an address"), (("a:1",), "is no address")]
)
def test_addresses_are_checked(key, value, reason):
    with pytest.raises(ValidationError, match=reason):
        ClientConfig.model_validate({key: value})
