"""Operations on tensors: tensors in, tensors out. Each op checks its arguments and picks a backend.

Files:
    forgetting_attention/, attention, path_attention    attention with forget gates, without, and PaTH-FoX's
    recurrence/, layers/                                linear recurrences and scans; norms, convolution, SwiGLU, loss
    arguments, backends, selftest                       checks of arguments; which kernels run; their self-test
    context                                             processes that share sequences
    compiling, eager, columns, finite                   helpers of kernels, of torch.compile and of loading

The letters at the end of a tensor's name are its axes, everywhere in this package: `q_BTHD` has the shape
`(B, T, H, D)`. A digit is an axis of that size. Files define only axes beyond this legend.

    A   all tokens of a batch, B·T
    B   sequences of a batch
    C   channels of a convolution or projection, all heads together
    D   channels of an attention head
    E   model width, hidden_size
    F   width of an MLP
    G   heads of keys and values; groups of heads that share something
    H   heads, of queries where keys have fewer
    I   inner width of Mamba and Mamba-2
    K   key channels of a head of a recurrence; states of a state space model
    L   layers
    N   keys: positions of the past and the new tokens
    Q   blocks of queries
    R   rank of Mamba's step sizes
    S   stretches of keys, which pruning keeps or leaves out as a whole
    T   new tokens: queries, or positions where all are new
    V   value channels of a head of a recurrence; words of the vocabulary, in logits and embeddings
    W   taps of a convolution; of the inputs before a sequence, W - 1
    Z   heads of all sequences, B·H

Lower case is a part of an axis: t and n the queries of a block and the keys that they see, n and c the chunks of a
sequence and the tokens of a chunk. In GPU kernels M × N is a tile of queries × keys.
"""
