"""Where an engine's settings are written for MoRIIO's connector: its words in place of ours."""

import logging
import os
from collections.abc import Sequence
from typing import Any

from stateferry.config import Config, parse_config
from stateferry.ferry.keys import numeric
from stateferry.layout.spec import Group
from stateferry.moriio import Moriio, MoriioDialect, Registration, message, read_settings, speaks_moriio
from stateferry.vllm.compat import current_platform, get_ip

logger = logging.getLogger(__name__)


class DropIn:
    """What MoRIIO's settings ask for beyond ours. The scheduler half uses it, once in an engine."""

    def __init__(self, moriio: Moriio, vllm_config: Any) -> None:
        self._moriio = moriio
        self._parallel = vllm_config.parallel_config
        self._produces: bool = vllm_config.kv_transfer_config.is_kv_producer
        self._registration: Registration | None = None

    def dialect(self, groups: Sequence[Group]) -> MoriioDialect:
        """How offers are written. Says once which settings have no effect."""
        if self._moriio.warning:
            logger.warning(self._moriio.warning)
        address = self._moriio.address
        parallel = self._parallel
        return MoriioDialect(
            groups,
            address._replace(host=numeric(address.host)),
            data_parallel_index=parallel.data_parallel_index,
            data_parallel_size=parallel.data_parallel_size,
            data_parallel_size_local=parallel.data_parallel_size_local,
        )

    def register(self) -> None:
        """Begin to tell the router of this engine, where one is named and nobody else does it."""
        proxy = self._moriio.proxy
        if proxy is None or self._registration is not None or not fronts_http(self._parallel):
            return
        said = message(
            self._moriio,
            produces=self._produces,
            data_parallel_size=self._parallel.data_parallel_size,
            tp_size=self._parallel.tensor_parallel_size,
        )
        self._registration = Registration(proxy.host, proxy.handshake, said)
        self._registration.start()
        logger.info("registers at %s:%d every few seconds", proxy.host, proxy.handshake)

    def stop(self) -> None:
        """Tell it no more. Idempotent."""
        if self._registration is not None:
            self._registration.stop()


def read_config(vllm_config: Any) -> tuple[Config, DropIn | None]:
    """The connector's settings, in whichever words they were written. Raises ConfigError."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if not speaks_moriio(extra):
        return parse_config(extra), None
    host = "" if extra.get("host_ip") or extra.get("host") else get_ip()
    rocm = current_platform.is_rocm()
    config, moriio = read_settings(extra, default_host=host, environ=os.environ, rocm=rocm)
    return config, DropIn(moriio, vllm_config)


def fronts_http(parallel: Any) -> bool:
    """Whether this engine is the one, of those behind one HTTP port, that speaks for them.

    vLLM makes data-parallel engines of dense models think that they are alone; only their index tells.
    """
    if parallel.data_parallel_external_lb:
        return True
    if parallel.data_parallel_hybrid_lb:
        return not parallel.data_parallel_rank_local
    return bool(parallel.data_parallel_index == 0)
