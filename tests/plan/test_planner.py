"""The planner: its arithmetic, its three renderings, and what it refuses."""

import io
import json

import pytest
from rich.console import Console

from blocktable.cli import run
from blocktable.core.errors import ConfigError, LoadError
from blocktable.plan import as_json, plan, plot, render
from blocktable.plan.planner import UNBOUNDED
from blocktable.plan.render import percent

LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
    "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131_072, "torch_dtype": "bfloat16",
}  # fmt: skip
GIB = 1 << 30


def small(**options):
    given = {"weight_bytes": 16 * GIB, "activation_bytes": GIB, "gpu": "h100"} | options
    return plan(LLAMA_8B, **given)


def test_bytes_and_blocks():
    made = small(context=1024, requests=1000)
    assert made.bytes_per_token == 2 * 8 * 128 * 2 * 32 == 131_072
    assert made.block_bytes == 16 * 131_072
    assert made.num_blocks == (int(80 * GIB * 0.9) - 17 * GIB) // made.block_bytes
    assert made.request_blocks == 64 and made.request_bytes == 128 << 20
    assert made.max_requests == (made.num_blocks - 1) // 64 == 439 and not made.enough


def test_the_documented_figures():
    """64 entries are 256 bytes; a thousand such rows 256 kB; 65,536 tokens fit in 48 KB."""
    table = small(context=1024, requests=1000).table
    assert table.row_bytes == 256
    assert table.host_bytes == table.device_bytes == 256_000
    assert table.share_of_cache == 4 / (16 * 131_072)
    long = small(context=65_536, requests=1).table
    assert long.row_bytes == 4 * 4096 and long.kernel_share == 1.0
    assert long.kernel_tokens == 12_288 * 16
    assert small(context=1 << 20, requests=1, gpu="b300").table.kernel_share == 12_288 / 65_536


def test_upload_per_step():
    table = small(context=1 << 20, requests=1024, gpu="x", gpu_memory_bytes=4000 * GIB).table
    assert table.upload_mean_bytes == 512 and table.upload_worst_bytes == 8192
    assert table.upload_whole_bytes == 256 << 20


def test_ranks_share_the_cache_and_the_weights():
    one = plan(LLAMA_8B, gpu="h200", requests=1)
    two = plan(LLAMA_8B, gpu="h200", requests=1, tensor_parallel_size=2)
    assert two.bytes_per_token * 2 == one.bytes_per_token
    assert one.weight_bytes == 8_030_261_248 * 2
    norms = (32 * 2 + 1) * 4096  # whole on every rank
    assert two.weight_bytes == norms * 2 + (8_030_261_248 - norms)


def test_fits_and_longest_context_agree():
    made = small(context=4096, requests=64)
    assert [fit.tokens for fit in made.fits] == [1024, 2048, 4096]
    assert all(f.requests == (made.num_blocks - 1) // f.blocks for f in made.fits)
    tokens = made.longest_context
    assert small(context=tokens, requests=64).enough
    assert not small(context=tokens + 1, requests=64).enough


def test_a_window_model_has_no_longest_context():
    config = LLAMA_8B | {"model_type": "mistral", "sliding_window": 4096}
    made = plan(config, gpu="h100", weight_bytes=16 * GIB, activation_bytes=0, requests=8)
    assert made.groups[0].kind == "sliding_window"
    assert made.groups[0].blocks_per_request == 257
    assert made.longest_context >= 1 << 30


def test_shared_prefix():
    saving = small(context=4096, requests=10, shared_prefixes=(1000,)).savings[0]
    assert saving.blocks == 62 * 9
    assert saving.share == 62 * 9 / (256 * 10)
    assert small(context=512, shared_prefixes=(1000,)).savings == ()


def test_hybrid_model_counts_its_states():
    config = LLAMA_8B | {"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4,
                         "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}  # fmt: skip
    made = plan(config, gpu="h200", weight_bytes=GIB, activation_bytes=0, requests=100)
    assert made.groups[0].num_layers == 4
    assert made.state_bytes_per_request == 28 * 8192 * 20 * 2
    assert made.savings == () and any("recurrent" in note for note in made.notes)
    free = int(141 * GIB * 0.9) - GIB - 100 * made.state_bytes_per_request
    assert made.num_blocks == free // made.block_bytes


def test_renderings(tmp_path):
    made = small(context=4096)
    console = Console(width=120, record=True, file=io.StringIO())
    render(made, console)
    text = console.export_text()
    for expected in ("131,072", "2,097,152", "full_attention", "do NOT fit", "block table, a row"):
        assert expected in text
    assert json.loads(as_json(made))["table"]["row_bytes"] == made.table.row_bytes
    picture = plot(made, tmp_path / "plan.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_from_a_folder_and_its_errors(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    options = {"weight_bytes": GIB, "activation_bytes": GIB}
    assert plan(tmp_path, **options).block_bytes == 16 * 131_072
    assert plan(tmp_path / "config.json", **options).context == 131_072
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match="not a readable configuration"):
        plan(tmp_path)
    with pytest.raises(LoadError, match="there is no"):
        plan(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests": 0}, "requests must be a positive integer, got 0"),
        ({"gpu": "abacus"}, "unknown device 'abacus'"),
        ({"weight_bytes": 200 * GIB}, "bytes are missing"),
        ({"weight_bytes": 75 * GIB}, "no room for a KV cache"),
        ({"context": 0}, "context"),
        ({"kv_dtype": "float3"}, "float3"),
        ({"tensor_parallel_size": 3}, "8 KV heads cannot be spread over 3 ranks"),
        ({"gpu": None}, "gpu must be a device's name, got None"),
        *(
            ({name: value}, f"{name} must be .*, got {value!r}")
            for name in (
                "context",
                "gpu_memory_bytes",
                "weight_bytes",
                "activation_bytes",
                "shared_memory_bytes",
                "block_size",
            )
            for value in (-5, "8", 2.5, True)
        ),
        ({"context": 10**30}, f"context must be at most {2**60}"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ConfigError, match=message):
        small(**options)


def test_a_family_nobody_knows_needs_its_weights_stated():
    config = LLAMA_8B | {"model_type": "brand_new"}
    with pytest.raises(ConfigError, match="give weight_bytes"):
        plan(config)
    assert plan(config, weight_bytes=GIB).bytes_per_token == 131_072


def drawn(made, width):
    console = Console(file=io.StringIO(), width=width)
    render(made, console)
    return console.file.getvalue()


def test_shares_are_percent_as_the_guide_says_them():
    """0.00019% for an 8B model at block 16; never a power of ten."""
    text = drawn(small(), 80)
    assert "0.00019%" in text and "e-0" not in text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.0%"), (1.0, "100.0%"), (0.5, "50.0%"), (0.0123, "1.2%"), (3.81e-6, "0.00038%"),
     (1e-20, "0.000000000000%")],
)  # fmt: skip
def test_percent(share, text):
    assert percent(share) == text


def test_kinds_of_groups_are_told_whole_in_80_columns():
    gemma = {"model_type": "gemma2", "num_hidden_layers": 26, "hidden_size": 2304, "head_dim": 256,
             "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256_000}  # fmt: skip
    made = plan(gemma, gpu="h100", requests=2, weight_bytes=GIB, activation_bytes=GIB)
    text = drawn(made, 80)
    assert all(group.kind in text for group in made.groups)
    assert max(map(len, text.splitlines())) <= 80
    assert all(len(line) == len(lines[0]) for lines in [text.split("KV cache groups")[1].split(
        "Requests that fit")[0].strip().splitlines()] for line in lines)  # fmt: skip


def test_the_bundled_model_is_planned_from_the_head_of_its_file():
    """The same name as for every other command; the same layers as the engine's."""
    from blocktable import LLM

    made = plan("smollm2", gpu="l4", requests=8)
    engine = LLM("smollm2", num_blocks=64, dtype="bfloat16", accelerate=False).engine
    assert made.block_bytes == engine.block_bytes
    assert made.weight_bytes == 2 * sum(p.numel() for p in engine.runner.model.parameters())
    assert made.context == 8192


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path, capsys):
    for path in (tmp_path / "nowhere" / "plan.png", tmp_path / "plan.nope"):
        with pytest.raises(ConfigError, match=path.name):
            plot(small(), path)
    assert run(["plan", "smollm2", "--gpu", "l4", "--plot", str(tmp_path / "no" / "x.png")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


SMALL = LLAMA_8B | {"num_hidden_layers": 4, "vocab_size": 1000}


def of_ranks(values, ranks):
    return plan(
        values, gpu="h200", requests=4, context=1024, tensor_parallel_size=ranks, weight_bytes=1
    )


@pytest.mark.parametrize(
    ("family", "shared"),
    [("llama", True), ("unheard_of", True), ("olmo2", False), ("phi3", False), ("jamba", False)],
)
def test_ranks_share_heads_where_the_engine_shares_them(family, shared):
    """Where transformers' plan gathers the heads, or leaves attention out, each rank has all."""
    values = SMALL | {"model_type": family, "pad_token_id": 0}
    one, two = of_ranks(values, 1), of_ranks(values, 2)
    assert two.block_bytes * (2 if shared else 1) == one.block_bytes
    assert any("does not split attention" in note for note in two.notes) == (not shared)


def test_recurrent_states_are_whole_on_every_rank_of_a_known_family():
    values = SMALL | {"model_type": "qwen3_next", "head_dim": 128, "linear_num_value_heads": 8}
    one, two = of_ranks(values, 1), of_ranks(values, 2)
    assert two.block_bytes * 2 == one.block_bytes
    assert two.state_bytes_per_request == one.state_bytes_per_request > 0


@pytest.mark.parametrize("family", ["llama", "unheard_of"])
def test_query_heads_that_ranks_cannot_share_are_refused(family):
    values = SMALL | {"model_type": family, "num_attention_heads": 4, "num_key_value_heads": 4}
    with pytest.raises(ConfigError, match="4 query heads cannot be spread over 8 ranks"):
        of_ranks(values, 8)


def test_a_family_that_the_engine_cannot_split_is_said_so():
    made = of_ranks(SMALL | {"model_type": "gpt_oss"}, 2)
    assert any("no tensor parallelism for 'gpt_oss'" in note for note in made.notes)


def test_a_context_without_limit_is_said_in_words():
    """Windows stop growing: one figure for "as long as you like", and no odd number of tokens."""
    values = SMALL | {"model_type": "mistral", "sliding_window": 256}
    made = plan(values, gpu="h200", requests=4, weight_bytes=1)
    assert made.longest_context == UNBOUNDED
    console = Console(width=120, record=True, file=io.StringIO())
    render(made, console)
    text = console.export_text()
    assert "without limit" in text and f"{UNBOUNDED:,}" not in text


def test_layers_are_counted_where_only_their_kinds_are_listed():
    pattern = "M-M*"
    values = {"model_type": "nemotron_h", "hidden_size": 64, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "hybrid_override_pattern": pattern,
              "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1,
              "conv_kernel": 4, "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    made = plan(values, gpu="h200", requests=4, context=1024, weight_bytes=1)
    assert [(group.kind, group.num_layers) for group in made.groups] == [("full_attention", 1)]
    recurrent, window = 8 * 16 * 16, (8 * 16 + 2 * 16) * 4
    assert made.state_bytes_per_request == 2 * (recurrent + window) * 2
