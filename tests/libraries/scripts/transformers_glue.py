"""A transformer on a text classification task, as Lightning's tutorial about Hugging Face trains it."""

import datasets
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup as linear_schedule,
)


class GLUEDataModule(pl.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size

    def prepare_data(self):
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{n}" for n in range(50))]
        with open("vocab.txt", "w") as file:
            file.write("\n".join(words))

    def setup(self, stage):
        self.tokenizer = BertTokenizerFast("vocab.txt")
        texts = [" ".join(f"word{(7 * n + k) % 50}" for k in range(3 + n % 9)) for n in range(96)]
        data = datasets.Dataset.from_dict({"text": texts, "labels": [n % 2 for n in range(96)]})
        data = data.map(lambda rows: self.tokenizer(rows["text"]), batched=True, remove_columns=["text"])
        self.dataset = data.train_test_split(test_size=0.25, seed=0)
        self.collate = DataCollatorWithPadding(self.tokenizer)

    def train_dataloader(self):
        return DataLoader(self.dataset["train"], batch_size=self.batch_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self):
        return DataLoader(self.dataset["test"], batch_size=self.batch_size, collate_fn=self.collate)


class GLUETransformer(pl.LightningModule):
    def __init__(self, learning_rate=2e-4, warmup_steps=4):
        super().__init__()
        self.save_hyperparameters()
        sizes = {"vocab_size": 60, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
        self.model = BertForSequenceClassification(BertConfig(num_hidden_layers=2, num_labels=2, **sizes))
        self.validation_step_outputs = []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        outputs = self.model(**batch)
        self.validation_step_outputs.append({"loss": outputs.loss, "preds": outputs.logits.argmax(1)})

    def on_validation_epoch_end(self):
        loss = torch.stack([each["loss"] for each in self.validation_step_outputs]).mean()
        self.log("val_loss", loss, prog_bar=True)
        self.validation_step_outputs.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = linear_schedule(optimizer, self.hparams.warmup_steps, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


if __name__ == "__main__":
    pl.seed_everything(42)
    model = GLUETransformer()
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(model, datamodule=GLUEDataModule())
    print("metrics", {name: value.item() for name, value in trainer.callback_metrics.items()})
    print("weights", sum(p.double().sum() for p in model.parameters()).item())
