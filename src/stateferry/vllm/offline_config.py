"""vLLM's own arguments and config files -> VllmConfig, as its server makes it, without starting anything."""

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from stateferry.errors import ConfigError
from stateferry.vllm.compat import server_arguments
from stateferry.vllm.plugin import MODULE, NAME

MAX_REASON = 200
"""Characters of one of vLLM's messages that are shown: some list every model that it knows."""


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vLLM does not take these arguments: {message}")


@contextmanager
def kept_environment() -> Iterator[None]:
    """Put back what vLLM sets in `os.environ` for the engine that it thinks it is about to start."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def make_config(arguments: Sequence[str], tp_size: int | None = None) -> VllmConfig:
    """The config of an engine that is started with these arguments of `vllm serve`.

    `--model` or `--config FILE` names the model; `tp_size` wins over what the arguments say. Without a
    `--kv-transfer-config` the engine gets ours, as `stateferry serve` gives it. Raises ConfigError.
    """
    try:
        parsed = server_arguments(_Parser()).parse_args(list(arguments))
        if parsed.model_tag is not None:
            parsed.model = parsed.model_tag
        engine_args = AsyncEngineArgs.from_cli_args(parsed)
        if engine_args.kv_transfer_config is None:
            engine_args.kv_transfer_config = KVTransferConfig(
                kv_connector=NAME, kv_connector_module_path=MODULE, kv_role="kv_both"
            )
        if tp_size is not None:
            engine_args.tensor_parallel_size = tp_size
        config: VllmConfig = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except ConfigError:
        raise
    except Exception as e:  # whatever vLLM, pydantic or transformers object to
        raise ConfigError(f"vLLM would not start like this: {short_reason(e)}") from e
    return config


@contextmanager
def arguments_of_file(path: Path) -> Iterator[list[str]]:
    """Arguments that read a config file as `vllm serve --config` does; JSON works as well as YAML.

    Raises ConfigError where there is no such file or it holds no settings.
    """
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError(f"config file {path} does not exist")
        yield ["--config", str(path)]
        return
    try:
        settings: Any = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(f"config file {path} is neither .yaml, .yml nor readable JSON: {e}") from e
    if not isinstance(settings, dict):
        raise ConfigError(f"config file {path} must hold an object, not {type(settings).__name__}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "config.yaml"  # vLLM goes by the name; JSON is YAML
        copy.write_text(json.dumps(settings))
        yield ["--config", str(copy)]


def short_reason(error: Exception) -> str:
    """The first sentences of what vLLM says, without pydantic's frame around them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and re.match(r"\d+ validation errors? for ", lines[0]):
        lines = [line for line in lines[1:] if " " in line] or lines
    text = lines[0] if lines else type(error).__name__
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    text = re.sub(r" \[type=.*", "", text).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    first, *others = re.split(r"(?<=[.!]) (?=[A-Z])", text)
    for sentence in others:
        if len(first) + len(sentence) > MAX_REASON:
            break
        first += f" {sentence}"
    return first.rstrip(".") if len(first) <= MAX_REASON else f"{first[:MAX_REASON]} …"
