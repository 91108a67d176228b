"""The ``retention`` field of a request reaches the cache, and leaves it when it is told to."""

import httpx
from serving import running

LONG = "a conversation that will go on. " * 4


def ask(http, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 2, **fields}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


def test_kept_prompts_outlive_others_and_are_given_up_when_told():
    with running(num_blocks=80, max_model_len=256) as server:
        manager = server.llm.engine.manager
        with httpx.Client(base_url=server.url) as http:
            ask(http, LONG, retention={"priority": 2, "seconds": 60})
            kept = manager.num_retained
            assert 0 < kept <= manager.pool.usable // 2
            for i in range(12):
                ask(http, f"{i} others come and go, " * 4)
            assert manager.num_retained == kept
            hit = manager.find_hit(manager.sequence(server.llm.encode(LONG)))
            assert hit.num_tokens > 0
            ask(http, LONG, retention=None)
        server.wait_idle()
        manager.unpin(server.llm.encode(LONG))
        assert manager.num_retained == 0
