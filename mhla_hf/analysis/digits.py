"""scikit-learn's 1,797 digits at any size: the small real data that every comparison here runs on by default.

Unusual: the 8 x 8 scans are enlarged bilinearly to uint8 once, so that training, scoring and looking see the same pixels.
"""

import torch
import torch.nn.functional as F

TEST = 497
DIGITS = "scikit-learn digits"


def load_digits(size: int = 32, seed: int = 0):
    """(train, test): each a pair of images uint8 `[N, 1, size, size]` and labels int64 `[N]`; N is 1,300 and 497.

    seed: of the split, which is the same for every model and every run. ImportError: scikit-learn is missing.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn, which is missing: pip install 'mhla_hf[eval]'") from error
    found = datasets.load_digits()
    images = torch.from_numpy(found.images).float()[:, None]
    labels = torch.from_numpy(found.target).long()
    images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    images = (images * (255 / 16)).round().clamp(0, 255).to(torch.uint8)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    return (images[:-TEST], labels[:-TEST]), (images[-TEST:], labels[-TEST:])
