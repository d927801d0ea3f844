"""Makes a small tokenizer, since those of benchmarks want one and nothing may be fetched: `tokenizer.py FOLDER`."""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"

folder = Path(sys.argv[1])
folder.mkdir(parents=True)
made = Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(
    vocab_size=600, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
)
made.train_from_iterator(["the quick brown fox jumps over the lazy dog, and sees another dog there"] * 8, trainer)
made.save(str(folder / "tokenizer.json"))
about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
about |= {"chat_template": TEMPLATE, "model_max_length": 32768}
(folder / "tokenizer_config.json").write_text(json.dumps(about))
config = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 600,
    "max_position_embeddings": 32768,
}
(folder / "config.json").write_text(json.dumps(config))
