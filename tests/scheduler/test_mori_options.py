"""What an operator sets about MoRI reaches the transport."""

import warnings

from stateferry.config import parse_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    from stateferry.vllm.worker import _mori_options

from stateferry.transport.mori_options import MoriBackend, MoriOptions


def test_nothing_set_is_the_transports_own_defaults() -> None:
    assert _mori_options(parse_config({})) == MoriOptions()


def test_every_setting_arrives_under_its_name() -> None:
    settings = {
        "mori_backend": "xgmi",
        "mori_qp_per_transfer": "4",
        "mori_post_batch_size": 64,
        "mori_num_workers": 2,
        "mori_num_streams": 8,
        "mori_num_events": 9,
        "mori_quiet_s": 1.5,
    }
    assert _mori_options(parse_config(settings)) == MoriOptions(MoriBackend.XGMI, 4, 64, 2, 8, 9, 1.5)
