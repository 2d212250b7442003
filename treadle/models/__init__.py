"""Networks: loading, forward passes over our own layouts, LoRA, heads.

Takes: a model's name or directory. Gives: a `Policy` that trainer and engine share.
"""
