"""Measures of a model and its tokenizer, wherever they come from: how well it predicts a text, and tasks of lm-eval.

Texts need nothing but this library. Tasks need the extra `twoaxis[evaluate]`, and lm-eval is imported only for them.
"""

from twoaxis.interop.evaluate.tasks import TaskFolder, open_tasks, run_tasks
from twoaxis.interop.evaluate.text import TextScore, score_texts, text_passage, total_score

__all__ = ["TaskFolder", "TextScore", "open_tasks", "run_tasks", "score_texts", "text_passage", "total_score"]
