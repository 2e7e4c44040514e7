"""Evaluation of a model with its tokenizer: perplexity of texts, and tasks of lm-eval.

Tasks need the extra `twoaxis[evaluate]`; lm-eval is imported only for them.
"""

from twoaxis.interop.evaluate.tasks import TaskFolder, open_tasks, run_tasks
from twoaxis.interop.evaluate.text import TextScore, score_texts, text_passage, total_score

__all__ = ["TaskFolder", "TextScore", "open_tasks", "run_tasks", "score_texts", "text_passage", "total_score"]
