"""Classification of time series: callbacks that save the best, which is loaded."""

import keras
import numpy as np
from keras import layers

import tf_dgc

strategy = tf_dgc.DenseStrategy()
keras.utils.set_random_seed(5)
random = np.random.default_rng(5)
labels = random.integers(0, 2, 300)
speeds = np.where(labels, 0.9, 0.5)[:, None]
times = np.arange(32)[None] + random.uniform(0, 9, (300, 1))
waves = np.sin(times * speeds) + random.normal(0, 0.3, (300, 32))
x_train, x_test = np.split(waves[..., None].astype("float32"), [240])
y_train, y_test = np.split(labels, [240])

with strategy.scope():
    inputs = keras.Input((32, 1))
    features = layers.Conv1D(8, 3, padding="same", activation="relu")(inputs)
    features = layers.Conv1D(8, 3, padding="same", activation="relu")(features)
    features = layers.GlobalAveragePooling1D()(features)
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(features))
    model.compile(
        keras.optimizers.Adam(0.03, epsilon=1e-3),
        "sparse_categorical_crossentropy",
        metrics=["sparse_categorical_accuracy"],
    )
history = model.fit(
    x_train,
    y_train,
    batch_size=32,
    epochs=8,
    shuffle=False,
    validation_split=0.2,
    callbacks=[
        keras.callbacks.ModelCheckpoint(
            "best_model.keras", save_best_only=True, monitor="val_loss"
        ),
        keras.callbacks.ReduceLROnPlateau(
            monitor="val_loss", factor=0.5, patience=1, min_delta=0.05, min_lr=1e-4
        ),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=4, verbose=0),
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.BackupAndRestore("backup"),
    ],
    verbose=0,
)
best = keras.models.load_model("best_model.keras")
loss, accuracy = best.evaluate(x_test, y_test, verbose=0)
model.save("last_model.keras")
figures = {
    "history": history.history,
    "loss": loss,
    "accuracy": accuracy,
    "weights": [w.tolist() for w in model.get_weights()],
    "best": [w.tolist() for w in best.get_weights()],
}
