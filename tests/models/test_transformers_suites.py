"""transformers' own suites of common tests on our models, from a checkout of transformers that TRANSFORMERS_TESTS names.

Each suite runs in a process of its own as `unittest`; one test of it, by hand, as
`python tests/models/test_transformers_suites.py LlamaSuite.test_model`.
"""

import os
import subprocess
import sys
import unittest

import pytest

CHECKOUT = os.environ.get("TRANSFORMERS_TESTS")
SUITES = ["LlamaSuite", "Qwen3Suite", "MixtralSuite", "ScratchSuite", "BertSuite", "VisionSuite"]
ATTENTIONS = "an MHLA layer has no attention matrix to give"
NOT_APPLICABLE = {  # in whichever suite, by how the names of the tests begin
    "test_attention_outputs": ATTENTIONS,
    "test_generate_with_quant_cache": "an MHLA layer keeps no keys and values that could be quantized",
    "test_custom_4d_attention_mask": "MHLA refuses masks that hides more than padding and the future",
    "test_inherits_generation_mixin": "it is inherited from the base's class, which inherits it",
}
ALL_MHLA = {  # where no layer has softmax
    "test_can_set_attention_dynamically": "there is no softmax whose implementation could be set"
}


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="TRANSFORMERS_TESTS names no checkout of transformers: see CONTRIBUTING.md")
@pytest.mark.parametrize("suite", SUITES)
def test_the_common_tests_of_transformers(suite):
    done = subprocess.run([sys.executable, __file__, suite], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-10000:]


def suites() -> dict[str, type]:
    sys.path.insert(0, CHECKOUT)
    import transformers
    from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester
    from tests.test_configuration_common import ConfigTester
    from tests.test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor, random_attention_mask

    from mhla_hf.checkpoints.load import register_family
    from mhla_hf.models import converted
    from mhla_hf.models.families import CAUSAL, auto_class_of, family_of_type
    from mhla_hf.models.language import language_model as language
    from mhla_hf.models.language.cache import MHLACacheLayer
    from mhla_hf.models.language.configuration import PAPER_SETTINGS
    from mhla_hf.models.vision import vision_model as vision

    class Suite:
        """Before a suite of transformers in the bases."""

        not_applicable = {}

        def setUp(self):
            for start, reason in {**NOT_APPLICABLE, **self.not_applicable}.items():
                if self._testMethodName.startswith(start):
                    self.skipTest(reason)
            super().setUp()
            for cls in self.all_model_classes:  # its tests know by a class's name what labels it takes
                names = getattr(transformers, auto_class_of(cls.__name__))._model_mapping._model_mapping
                names[cls.config_class.model_type] = cls.__name__

        def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
            """Every layer has seen every token; what a softmax layer holds has its usual shape."""
            for layer in past_key_values.layers:
                self.assertEqual(layer.get_seq_length(), seq_length)
                if not isinstance(layer, MHLACacheLayer):
                    self.assertEqual(layer.keys.shape, self._get_attention_shape(batch_size, seq_length, config))

    def language_suite(module, name, *, not_applicable=None, **mhla):
        """The suite of a language model whose classes are `module.<name>Model`, ..."""
        heads = [auto_class.removeprefix("AutoModel") or "Model" for auto_class in CAUSAL.auto_classes]
        classes = {head: getattr(module, name + head, None) for head in heads}
        ends = {"causal_lm": "CausalLM", "question_answering": "QuestionAnswering"}
        ends |= {"sequence_classification": "SequenceClassification", "token_classification": "TokenClassification"}
        classes["ForCausalLM"]._can_compile_fullgraph = mhla.get("windowed", False)  # which only these tests read
        members = {f"{head}_class": classes[f"For{end}"] for head, end in ends.items()}
        members |= {"base_model_class": classes["Model"], "config_class": classes["Model"].config_class}
        members |= {"forced_config_args": ["pad_token_id", "mhla"], "mhla": {"block_size": 4, "num_blocks": 4, **mhla}}
        own = {"model_tester_class": type("Tester", (CausalLMModelTester,), members)}
        own |= {"_torch_compile_train_cls": classes["ForCausalLM"], "has_attentions": mhla["layers"] != "all"}
        own |= {"not_applicable": {**(not_applicable or {}), **({} if own["has_attentions"] else ALL_MHLA)}}
        return type(f"{name}Suite", (Suite, CausalLMModelTest, unittest.TestCase), own)

    class BertTester:
        is_training, batch_size, seq_length, hidden_size, num_attention_heads, num_hidden_layers = True, 5, 7, 32, 4, 2

        def sizes(self):
            return {name: getattr(self, name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")}

        def get_config(self):
            mhla = {"block_size": 4, "num_blocks": 32, "layers": "2/3"}
            sizes = {**self.sizes(), "vocab_size": 99, "intermediate_size": 37, "max_position_embeddings": 128}
            return converted.MHLABertConfig(**sizes, mhla=mhla)

        def prepare_config_and_inputs_for_common(self):
            shape = [self.batch_size, self.seq_length]
            inputs = {"input_ids": ids_tensor(shape, 99), "attention_mask": random_attention_mask(shape)}
            return self.get_config(), inputs

    class VisionTester(BertTester):
        seq_length = 64

        def get_config(self):
            return vision.MHLAVisionConfig(image_size=16, patch_size=2, **self.sizes())

        def prepare_config_and_inputs_for_common(self):
            return self.get_config(), {"pixel_values": floats_tensor([self.batch_size, 3, 16, 16])}

    class BertSuite(Suite, ModelTesterMixin, unittest.TestCase):
        ends = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
        all_model_classes = tuple(getattr(converted, f"MHLABert{end}") for end in ends)

        def setUp(self):
            register_family(family_of_type("bert"))
            self.model_tester = BertTester()
            super().setUp()

        def test_config(self):
            ConfigTester(self, config_class=converted.MHLABertConfig, hidden_size=32).run_common_tests()

    class VisionSuite(Suite, ModelTesterMixin, unittest.TestCase):
        all_model_classes = (vision.MHLAVisionModel, vision.MHLAForImageClassification)
        has_attentions = test_resize_embeddings = False
        not_applicable = {
            "test_can_load_ignoring_mismatched_shapes": "it sets image_std, a list, to a number",
            "test_model_get_set_embeddings": "it asks for nn.Embedding, of which a model of images has none",
        }

        def setUp(self):
            self.model_tester = VisionTester()
            super().setUp()

        def test_config(self):
            config = {"config_class": vision.MHLAVisionConfig, "has_text_modality": False, "hidden_size": 48}
            ConfigTester(self, **config).run_common_tests()

    window = {"windowed": True, "sinks": 2}
    sliding = {"test_eager_matches_sdpa_inference": "it sets a sliding window, which MHLA refuses"}
    return {
        "LlamaSuite": language_suite(converted, "MHLALlama", layers="2/3", **window),
        "Qwen3Suite": language_suite(converted, "MHLAQwen3", layers="all", **window),
        "MixtralSuite": language_suite(converted, "MHLAMixtral", layers="2/3", not_applicable=sliding),
        "ScratchSuite": language_suite(language, "MHLA", layers="all", **PAPER_SETTINGS),
        "BertSuite": BertSuite,
        "VisionSuite": VisionSuite,
    }


if __name__ == "__main__":
    globals().update(suites())
    unittest.main()
