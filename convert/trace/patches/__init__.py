"""Every change that is made to torch, diffusers or transformers, each a context manager.

On leaving all is as it was (`tests/convert/trace/test_patches.py`), but for the operators that
`operators.py` registers. Each names the version of torch that it was written for.
"""
