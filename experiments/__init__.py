"""What stands behind the numbers of README and docs: run from a clone, not part of the installed package.

python -m experiments.demo            the whole journey on two CPU cores (`make demo`)
python -m experiments.studies NAME    the paper's comparisons on a small machine (`make demo-images` is `images`)
python -m experiments.digits_vit      a softmax ViT on real digits, converted and distilled without labels
python -m experiments.digits_dit      a DiT on real digits, from scratch, converted, distilled
python -m experiments.costs           parameters and multiply-adds beside the paper's table 2
"""
