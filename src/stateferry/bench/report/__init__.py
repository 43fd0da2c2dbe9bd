"""A page with plots from the results of benches."""

from stateferry.bench.report.page import page

__all__ = ["page"]
