"""Evaluate a real language model and its conversions: lookups in long texts, few-shot tasks, and chats.

The prefix that questions share (a long text, or the examples) is read once, and each question continues a copy of its
cache, so that many questions can be asked on a small machine. Forms are those of `experiments.heads`.
"""

import copy
import functools
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.tasks
import torch
from lm_eval.api.samplers import FirstNSampler
from lm_eval.models.huggingface import HFLM

from mhla_hf.cli.main import script
from mhla_hf.evaluation.language import load_tasks, quiet_harness
from mhla_hf.evaluation.recall import filler_lines, make_text
from mhla_hf.models.transformers_api import forward_cached

from .heads import FORMS, converted, load, load_folder, load_tokenizer, read_text
from .rows import Row, add_rows, describe_setup, format_mean, make_parser, markdown, parse_call

SOFTMAX = "softmax"
LENGTHS = {1024: 7, 2048: 2, 4096: 2, 8192: 2}  # tokens of a long text: number of texts per file
FACTS = {1024: (5, 5), 2048: (12, 24), 4096: (12, 24), 8192: (12, 24)}  # number of codes and of lookups in a text
NEAR = 448  # tokens at the end of a text that have no facts, so that all facts have left the window
SHOWN = 3  # other facts repeated before a question, as examples of the format
TASKS = {  # folder in lm-eval, examples in the prompt: about 1,100 tokens
    "lambada_openai": ("lambada", 14),
    "piqa": ("piqa", 28),
    "arc_easy": ("arc", 36),
    "arc_challenge": ("arc", 22),
    "winogrande": ("winogrande", 50),
    "openbookqa": ("openbookqa", 70),
}
NUM_DOCUMENTS = 60  # per task
MAX_ANSWER_TOKENS, PASSAGE_TOKENS = 80, 1400
PASSAGES = {
    "1933 Treasure Coast hurricane": "Where and when did the hurricane make landfall in Florida, and what was the damage?",
    "Ben Amos": "Where was Ben Amos born, and which position does he play?",
}
QUESTIONS = (
    "What is gravity?",
    "Write a short poem about the sea.",
    "What is the capital of France, and what is it known for?",
    "Explain to a child why the sky is blue.",
    "Give me three tips for sleeping better.",
    "Translate into Spanish: The book is on the table.",
    "Write a Python function that adds two numbers.",
    "Tom has three apples and buys five more. How many apples does he have?",
)
BATCH_SIZE = 6  # questions

Question = tuple[list[int], list[int], list[int]]  # token ids of question, answer, and choices; see `answer_scores`


@functools.lru_cache(maxsize=2)
def load_subject(model_folder: str, fit_text: str, work: str, form: str, heads: int) -> tuple[Any, Any]:
    """Load the original, a saved conversion or adapter from a folder, or make a conversion to a form of
    `experiments.heads`, with its tokenizer."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    tokenizer = load_tokenizer(model_folder)
    if form == SOFTMAX:
        return load(model_folder), tokenizer
    arguments = {"model": model_folder, "fit": fit_text, "work": work, "folders": [form]}
    job = {"form": Path(form).name, "heads": heads, "seed": 0}
    return converted(arguments, job)[0] if form in FORMS else load_folder(arguments, job), tokenizer


@torch.no_grad()
def answer_scores(model: Any, prefix: Sequence[int], questions: Sequence[Question]) -> list[tuple[float, bool]]:
    """Score the answers to questions that follow the same prefix: (log-probability, whether the model gives this answer).

    It gives the likeliest of the choices, if there are some (of one token each), else what greedy decoding writes.
    """
    _, cache = forward_cached(model, torch.tensor([prefix]), logits_to_keep=1)
    scores = []
    for first in range(0, len(questions), BATCH_SIZE):
        batch = questions[first : first + BATCH_SIZE]
        rows = [[*question, *answer][:-1] for question, answer, _ in batch]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)  # padded on the right, which no token sees
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        batch_cache = copy.deepcopy(cache)
        batch_cache.batch_repeat_interleave(len(rows))
        logits = forward_cached(model, ids, batch_cache)[0].logits
        for row, (question, answer, choices) in zip(logits, batch, strict=True):
            log_p = row[len(question) - 1 :][: len(answer)].float().log_softmax(-1)
            target = torch.tensor(answer)
            prediction = torch.tensor(choices)[log_p[:, choices].argmax(-1)] if choices else log_p.argmax(-1)
            score = float(log_p.gather(-1, target[:, None]).sum())
            scores.append((score, bool((prediction == target).all())))
    return scores


def judge_lookups(model: Any, tokenizer: Any, data: Sequence[str], job: Row) -> dict[str, Any]:
    """Ask about facts that stand between the lines of a text file.

    "answers" has, for each question, [kind, tokens back, log-probability of the answer, whether it is right].
    """
    text = next(text for text in data if Path(text).name == job["text"])
    ids, rows = make_lookups(tokenizer, read_text(text), job["length"], job["seed"])
    scores = answer_scores(model, ids, [question for _, _, question in rows])
    return {"answers": [[kind, back, *score] for (kind, back, _), score in zip(rows, scores, strict=True)]}


def make_lookups(
    tokenizer: Any, text: str, length: int, seed: int
) -> tuple[list[int], list[tuple[str, int, Question]]]:
    """Make a text of about `length` tokens with facts at even distances, none in its last `NEAR` tokens, and questions.

    Returns its token ids and, for each fact, its kind ("code" or "lookup"), the tokens after it, and a `Question`.
    """
    rng = random.Random(f"lookups {length} {seed}")

    def encode(piece: str) -> list[int]:
        return tokenizer(piece, add_special_tokens=False, verbose=False).input_ids

    num_codes, num_lookups = FACTS[length]
    kinds = ["codes"] * num_codes + ["lookups"] * num_lookups
    rng.shuffle(kinds)
    facts = [(kind, 100 * (index + 1) / len(kinds)) for index, kind in enumerate(kinds)]
    lines, examples = filler_lines(text), {"codes": SHOWN, "lookups": SHOWN}
    long_text, questions = make_text(tokenizer, lines, length - NEAR, facts, rng, examples=examples)
    tail = ""
    for line in itertools.cycle(lines[rng.randrange(len(lines)) :] + lines):
        tail += line
        if len(encode(tail)) >= NEAR:
            break
    long_text += tail
    rows = []
    for kind, end, prompt, answer, choices in questions:
        likeliest = [encode(choice)[0] for choice in choices] if kind == "lookups" else []
        rows.append((kind[:-1], len(encode(long_text[end:])), (encode(prompt), encode(answer), likeliest)))
    return encode(long_text), rows


class PrefixReader(HFLM):
    """lm-eval's model, except that the prefix that all requests of a task share (`shared` tokens) is read once."""

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return what `answer_scores` does for the requests, after reading their shared prefix."""
        columns = zip(*(context for _, context, _ in requests), strict=False)
        equal_columns = itertools.takewhile(lambda column: len(set(column)) == 1, columns)
        prefix = [column[0] for column in equal_columns][:-1]  # a question has at least one token
        self.shared = len(prefix)
        questions: list[Question] = [(context[len(prefix) :], answer, []) for _, context, answer in requests]
        return answer_scores(self.model, prefix, questions)


def judge_task(model: Any, tokenizer: Any, data: Sequence[str], job: Row) -> dict[str, Any]:
    """Evaluate a few-shot task of lm-eval, with its first documents as the examples in every prompt.

    The first of `data` is what `mhla-hf evaluate --data-files` takes. "answers" has, for each document, [its index, whether
    the answer is right, log-likelihoods of the choices].
    """
    name = job["task"]
    folder, shots = TASKS[name]
    task_folder = Path(lm_eval.tasks.__file__).parent / folder
    loaded = load_tasks([name], [task_folder], num_fewshot=shots, data_files=data[0])[0].loaded
    task = loaded["tasks"][name]
    task.sampler = FirstNSampler(task.eval_docs.to_list())
    reader = PrefixReader(pretrained=model, tokenizer=tokenizer)
    documents = {name: list(range(shots, shots + NUM_DOCUMENTS))}
    with quiet_harness(progress=False):
        samples = lm_eval.evaluate(reader, loaded, samples=documents, bootstrap_iters=0)["samples"][name]
    answers = [
        [sample["doc_id"], sample["acc"], [score for score, _ in sample["filtered_resps"]]] for sample in samples
    ]
    return {"shots": shots, "shared_tokens": reader.shared, "answers": sorted(answers)}


def judge_chats(model: Any, tokenizer: Any, data: Sequence[str], job: Row) -> dict[str, Any]:
    """Answer questions about passages of WikiText-2's test split, and `QUESTIONS`, by greedy decoding.

    "answers" has, for each, [tokens of the prompt, its last line, the answer].
    """
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.eos_token
    text, passages = read_text(data[0]), []
    for title, question in PASSAGES.items():
        passage = text[text.index(f" = {title} = ") :][: 8 * PASSAGE_TOKENS]
        ids = tokenizer(passage, add_special_tokens=False).input_ids
        passages.append(f"{tokenizer.decode(ids[:PASSAGE_TOKENS])}\n\n{question}")
    answers: list[list[Any]] = []
    for prompts in (passages, QUESTIONS):
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        options = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(chats, **options)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        num_tokens = inputs["attention_mask"].sum(1).tolist()
        lines = [prompt.splitlines()[-1] for prompt in prompts]
        answers += map(list, zip(num_tokens, lines, texts, strict=True))
    return {"answers": answers}


def make_row(arguments: Mapping[str, Any], job: Row) -> Row:
    model, tokenizer = load_subject(arguments["model"], arguments["fit"], arguments["work"], job["form"], job["heads"])
    return {**job, **JUDGES[job["what"]](model, tokenizer, arguments["data"], job)}


JUDGES: dict[str, Callable[..., Row]] = {"lookups": judge_lookups, "tasks": judge_task, "chats": judge_chats}


def jobs_of(arguments: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the jobs, model by model, so that each model is made once."""
    parts: dict[str, list[Row]] = {
        "lookups": [
            {"length": length, "text": Path(text).name, "seed": seed}
            for length, count in LENGTHS.items()
            for text in arguments["data"]
            for seed in range(count)
        ],
        "tasks": [{"task": task} for task in TASKS],
        "chats": [{}],
    }
    for name in arguments["rows"]:
        form, _, heads = name.partition(":")
        for part in parts[arguments["what"]]:
            yield {"what": arguments["what"], "form": form, "heads": int(heads or 0), **part}


Answers = dict[Any, list[list[Any]]]  # by the value of a row's key


def answers_by_model(record: Mapping[str, Any], key: str) -> tuple[dict[str, Answers], Answers]:
    """Return the answers by model, as the tables name it, and by a key of the rows, and those of the original."""
    models: dict[str, Answers] = {}
    for row in sorted(record["rows"], key=lambda row: row.get("seed", 0)):
        name = row["form"] if row["form"] == SOFTMAX else f"{row['form']}, {row['heads']} heads"
        models.setdefault(name, {}).setdefault(row[key], []).extend(row["answers"])
    return models, models[SOFTMAX]


def render_lookups(record: Mapping[str, Any]) -> str:
    """Render the accuracy by kind and length, and the mean log-probability of the answers of lookups."""
    models, original = answers_by_model(record, "length")
    lengths = sorted(original)
    names = [f"{kind} at {length // 1024}k" for length in lengths for kind in ("codes", "lookups", "log p")]
    lines = []
    for name, answers in models.items():
        cells = [name]
        for length in lengths:
            of_length = answers.get(length, [])
            lookups = [log_p for kind, _, log_p, _ in of_length if kind == "lookup"]
            for kind in ("code", "lookup"):
                is_right = [100 * right for column_kind, _, _, right in of_length if column_kind == kind]
                cells.append(format_mean(is_right, "{:.0f}") if is_right else "")
            cells.append(f"{statistics.fmean(lookups):.2f}" if lookups else "")
        lines.append(cells)
    counts = ", ".join(f"{len(original[length])} questions at {length // 1024}k" for length in lengths)
    return f"{markdown(['right, %', *names], lines)}\n\n{counts}. {describe_setup(record)}"


def render_tasks(record: Mapping[str, Any]) -> str:
    """Render the accuracy of the original and the first conversion, and how often both choose the same answer."""
    models, original = answers_by_model(record, "task")
    model, converted_answers = next(item for item in models.items() if item[0] != SOFTMAX)
    groups = {task: (original[task], converted_answers[task]) for task in original if task in converted_answers}
    originals, conversions = zip(*groups.values(), strict=True)
    groups["all"] = list(itertools.chain(*originals)), list(itertools.chain(*conversions))
    shared_tokens = {row["task"]: f"{row['shared_tokens']:,}" for row in record["rows"]}

    def choice(answer: Sequence[Any]) -> Any:
        """Return the index of the choice that a model takes or, for a task without choices, whether it is right."""
        _, is_right, scores = answer
        return is_right if len(scores) == 1 else scores.index(max(scores))

    lines = []
    for task, group in groups.items():
        pairs = list(zip(*group, strict=True))
        cells = [format_mean([100 * answer[1] for answer in answers], "{:.1f}") for answers in group]
        cells.append(format_mean([100 * (answer[1] - reference[1]) for reference, answer in pairs], "{:+.1f}"))
        cells.append(
            f"{100 * statistics.fmean(choice(answer) == choice(reference) for reference, answer in pairs):.0f}"
        )
        lines.append([task, shared_tokens.get(task, ""), str(len(pairs)), *cells])
    header = ["task", "tokens of the examples", "questions", SOFTMAX, model, "difference", "same choice, %"]
    return f"{markdown(header, lines)}\n\n{describe_setup(record)}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=JUDGES, help="kind of evaluation")
    parser.add_argument("model", help="folder of a softmax language model with a chat template")
    data_help = "lookups: text files; tasks: lm-eval's data files; chats: WikiText-2's test split"
    parser.add_argument("data", nargs="+", help=data_help)
    parser.add_argument("--fit", required=True, help="text file to fit conversions on")
    rows_help = f"{SOFTMAX}, {', '.join(FORMS)}, or the folder of a conversion or adapter"
    parser.add_argument("--rows", nargs="+", required=True, metavar="FORM[:HEADS]", help=rows_help)
    parser.add_argument("--work", default="out-heads", help="folder for fitted conversions")
    args, command = parse_call(parser, "judge", None)
    make = functools.partial(make_row, vars(args))
    add_rows(f"docs/language/{args.what}.json", make, list(jobs_of(vars(args))), command)


if __name__ == "__main__":
    script(main, "judge")
