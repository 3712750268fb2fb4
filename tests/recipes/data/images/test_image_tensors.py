"""Images moved and mirrored: only by whole pixels, and by the numbers given."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.recipes.data.images.image_tensors import vary_images


@given(seed=st.integers(0, 1000), shift=st.integers(0, 3), flip=st.booleans())
def test_each_is_the_image_moved_and_maybe_mirrored(
    seed: int, shift: int, *, flip: bool
) -> None:
    """One of the (2 shift + 1)^2 places, as it is or mirrored, zeros around."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(5, 3, 6, 6, generator=generator)
    uniform = torch.rand(5, 3, generator=generator)
    varied = vary_images(images, uniform, shift_pixels=shift, flip=flip)

    padded = torch.zeros(5, 3, 6 + 2 * shift, 6 + 2 * shift)
    padded[:, :, shift : shift + 6, shift : shift + 6] = images
    places = range(2 * shift + 1)
    views = [padded[:, :, y : y + 6, x : x + 6] for y in places for x in places]
    if flip:
        views += [view.flip(-1) for view in views]
    equal = torch.stack([(varied == view).flatten(1).all(1) for view in views])
    assert equal.any(0).all()


def test_numbers_decide_where_and_whether() -> None:
    """Zeros move it down and right as far as may be, and mirror it."""
    image = torch.arange(9.0).view(1, 1, 3, 3)
    least, most = torch.zeros(1, 3), torch.full((1, 3), 0.999)
    assert vary_images(image, least, shift_pixels=1, flip=False).tolist() == [
        [[[0, 0, 0], [0, 0, 1], [0, 3, 4]]]
    ]
    assert vary_images(image, most, shift_pixels=1, flip=True).tolist() == [
        [[[4, 5, 0], [7, 8, 0], [0, 0, 0]]]
    ]
    middle = torch.tensor([[0.5, 0.5, 0.0]])
    assert torch.equal(
        vary_images(image, middle, shift_pixels=1, flip=True), image.flip(-1)
    )
