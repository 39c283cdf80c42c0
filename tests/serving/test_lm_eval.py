"""lm-evaluation-harness gets the same numbers from a server, `local-completions`, as from the model itself, `hf`."""

from __future__ import annotations

import json

import pytest
import torch
from models import tiny_model, tiny_tokenizer
from servers import serving

from acgpt import LanguageModel, Metadata

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'lm-eval[api]'")
pytestmark = pytest.mark.slow

COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}
CHOICES = COMMON | {
    "task": "tiny_choices",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc"}],
}
GENERATE = COMMON | {
    "task": "tiny_generate",
    "output_type": "generate_until",
    "generation_kwargs": {"until": ["the"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match"}],
}
DOCUMENTS = [
    {"question": "The cat sat on the", "choices": ["mat.", "dog and the bird.", "log"], "answer": 0},
    {"question": "The capital of France is", "choices": ["Paris.", "Rome.", "a cat é"], "answer": 0},
    {"question": "A bird saw", "choices": ["the cat", "a dog", "Madrid"], "answer": 1},
    {"question": "The dog", "choices": ["sat on the log.", "saw"], "answer": 1},
]


def likeliest(network, tokenizer):
    """A question that the network answers with a word, which is one token."""
    words = ["cat", "dog", "bird", "mat", "log", "the", "sat", "on", "saw", "a", "and", "of", "is", "Paris", "Rome"]
    for word in words:
        for question in (f"The {word}", f"A {word}", f"{word} {word}", word):
            ids = tokenizer(question, add_special_tokens=False)["input_ids"]
            token = int(network(torch.tensor([ids])).logits[0, -1].argmax())
            text = tokenizer.decode([token])
            whole = tokenizer(question + text, add_special_tokens=False)["input_ids"]
            if text[:1] == " " and whole == [*ids, token]:
                return {"question": question, "choices": [text[1:], "é"], "answer": 0}
    raise AssertionError("no question is answered with a word")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of transformers in fp32, with its tokenizer, and the tasks."""
    folder = tmp_path_factory.mktemp("lm-eval")
    tokenizer = tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")
    network = tiny_model("llama", vocabulary=len(tokenizer), scale=0.15, positions=96)
    network.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    data = folder / "data.jsonl"
    documents = [*DOCUMENTS, likeliest(network, tokenizer)]
    data.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    (folder / "tasks").mkdir()
    for task in (CHOICES, GENERATE):
        config = {**task, "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / "tasks" / f"{task['task']}.yaml").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def evaluated(folder):
    """The answers of `hf`, and of `local-completions` on token ids and on text: for each task and question a list."""
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = folder / "model"

    def answers(model, arguments):
        tasks = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
        names = ["tiny_choices", "tiny_generate"]
        results = lm_eval.simple_evaluate(
            model=model, model_args=arguments, tasks=names, task_manager=tasks, log_samples=True, bootstrap_iters=0
        )
        return {name: [sample["resps"] for sample in results["samples"][name]] for name in names}, results["results"]

    lm = LanguageModel(
        AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path), metadata=Metadata()
    )
    with serving(lm) as (address, _), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "unused")
        remote = {"model": "tiny", "base_url": f"{address}/v1/completions", "tokenizer": str(path), "max_length": 96}
        remote |= {"num_concurrent": 1, "max_retries": 1}
        found = {
            "ids": answers("local-completions", {**remote, "tokenizer_backend": "huggingface", "batch_size": 3}),
            "concurrent": answers(
                "local-completions", {**remote, "tokenizer_backend": "huggingface", "num_concurrent": 4}
            ),
        }
    local = {"pretrained": str(path), "dtype": "float32", "max_length": 96, "device": "cpu"}
    return {"hf": answers("hf", local), **found}


@pytest.mark.parametrize("sent", ["ids", "concurrent"])
def test_log_likelihoods_are_those_of_the_model_itself(evaluated, sent):
    (expected, scores), (found, own_scores) = evaluated["hf"], evaluated[sent]
    greedy = []
    for mine, others in zip(found["tiny_choices"], expected["tiny_choices"], strict=True):
        for ((log_prob, is_greedy),), ((its_log_prob, its_greedy),) in zip(mine, others, strict=True):
            assert float(log_prob) == pytest.approx(float(its_log_prob), rel=0, abs=1e-4)
            assert is_greedy == its_greedy
            greedy.append(is_greedy)
    assert len(greedy) == 13 and any(greedy) and not all(greedy)
    assert own_scores["tiny_choices"]["acc,none"] == scores["tiny_choices"]["acc,none"]


@pytest.mark.parametrize("sent", ["ids", "concurrent"])
def test_greedy_texts_are_those_of_the_model_itself(evaluated, sent):
    assert evaluated[sent][0]["tiny_generate"] == evaluated["hf"][0]["tiny_generate"]
