"""The measurements behind the figures of README and docs. They run from a clone and are not part of the installed package.

python -m experiments.demo            the whole journey on two CPU cores (`make demo`)
python -m experiments.attention       the rank that attention can have (table 1)
python -m experiments.classifiers     softmax, plain linear attention, and MHLA learn digits (`make demo-images`)
python -m experiments.digits_vit      a softmax ViT on real digits, converted and distilled without labels
python -m experiments.calibrate_grids a start from the softmax original for tiny diffusion models
python -m experiments.distill_grids   the same models distilled, and which digits a judge recognizes in their samples
python -m experiments.recipe_costs    the memory of every recipe; parameters and multiply-adds of the paper's classifiers
python -m experiments.heads           how many KV heads of a real language model keep softmax, and what that costs
python -m experiments.judge           lookups and tasks of a real language model and its conversions
python -m experiments.kvpress_rows    conversion against cache compression at equal bytes
python -m experiments.encoder         a real text encoder and its conversions
python -m experiments.speed           a converted language model beside its original, by length
python -m experiments.vllm_serving    a conversion inside vLLM, against softmax and against transformers
python -m experiments.bench           the operator beside softmax and plain linear attention (`make bench`)
python -m experiments.gpu             every kernel and every speed on a GPU (`make gpu`)
python -m experiments.docs            the tables of README and docs, from their JSON files (`make docs`)
"""
