"""Whatever the API description allows (and much that it does not) never makes a server error."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    status_code_conformance,
)
from serving import running

from blocktable.engine.params import SamplingLimits
from blocktable.serve.config import ServerConfig


@pytest.fixture(scope="module")
def small():
    config = ServerConfig(port=0, sampling=SamplingLimits(max_n=2), max_prompts=4)
    with running(config, max_model_len=64) as server:
        yield server


@pytest.fixture(scope="module")
def api(small):
    return schemathesis.openapi.from_url(f"{small.url}/openapi.json")


OPERATIONS = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("GET", "/v1/models"), ("GET", "/v1/models/{model}"),
    ("GET", "/health"), ("GET", "/metrics"), ("GET", "/version"),
]  # fmt: skip


def test_every_operation_is_looked_at(api):
    described = {(method.upper(), path) for path in api for method in api[path]}
    assert described == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda x: x)
def test_the_api_holds_what_it_describes(api, small, method, path):
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]

    @given(st.data())
    @settings(
        max_examples=40, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def check(data):
        mode = data.draw(st.sampled_from(modes)) if method == "POST" else modes[0]
        case = data.draw(api[path][method].as_strategy(generation_mode=mode))
        case.call_and_validate(
            checks=[not_a_server_error, status_code_conformance, content_type_conformance]
        )
        assert small.bridge.alive

    check()
