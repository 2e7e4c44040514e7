"""Alias of `twoaxis.interop.engines.vllm`, which the entry points of installed versions name."""

from twoaxis.interop.engines.vllm import register

__all__ = ["register"]
