"""How large are the sample models, in whichever framework they are written?"""

from __future__ import annotations

SEED = 20_200_510

# imdb_transformer: words known, words per review, and the one block.
VOCABULARY = 20_000
LENGTH = 200
EMBEDDING = 32
HEADS = 2
FEED_FORWARD = 32

# sequence_transformer: the longest sequence, and blocks wide enough that its length, not the call, takes the time.
SEQUENCE_MAX = 256
SEQUENCE_EMBEDDING = 128
SEQUENCE_HEADS = 4
SEQUENCE_FEED_FORWARD = 512
SEQUENCE_BLOCKS = 2

# text_recognition: a grey line of text in; for each of 26 places 36 characters and the blank out.
TEXT_HEIGHT = 32
TEXT_WIDTH = 100
TEXT_CHANNELS = 512
TEXT_CLASSES = 37

# resnet50
CLASSES = 1000
