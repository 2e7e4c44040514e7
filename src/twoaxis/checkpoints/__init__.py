"""Floor 5, below the others: trained models in files, and retrofits.

`published_folder`, `configuration` (`config.json`), `gguf_file` and `source_files` read published models, `layouts` maps their
names of parameters to ours, and `retrofit` adds mixers to a trained model. Only GGUF files need an extra, `twoaxis[gguf]`.
"""
