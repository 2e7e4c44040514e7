"""Floor 5: other libraries around models of ours.

`hugging_face` is for transformers, `engines` for vLLM, SGLang and torchtitan, `evaluate` scores texts and tasks, and
`serve` answers requests. Only here are transformers, lm-eval, fastapi and torchtitan imported, and only by what needs them:
`hugging_face` needs the extra `twoaxis[hf]`, tasks need `evaluate`, the server needs `serve`.
"""
