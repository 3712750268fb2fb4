// Pointer, wheel and keys.

/**
 * The wheel zooms where the pointer was moved to, and leaves the page's scrolling alone
 * while the page scrolls under a pointer at rest. With Ctrl it always zooms (pinching
 * on a touchpad arrives so).
 */
function listenToWheel(element, timeAt, view) {
  let isMeant = false;
  element.addEventListener("pointermove", (event) => {
    if (event.movementX || event.movementY) isMeant = true;
  });
  addEventListener("scroll", () => (isMeant = false), { passive: true });
  element.addEventListener("wheel", (event) => {
    const size = event.deltaMode === 1 ? 16 : 1;
    const across = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
    if (Math.abs(across) > Math.abs(event.deltaY) || event.shiftKey) {
      if (view.moveBy((across * size * view.span()) / element.clientWidth)) event.preventDefault();
      return;
    }
    if (!isMeant && !event.ctrlKey) return;
    const isChanged = view.zoom(Math.exp(-event.deltaY * size * 0.002), timeAt(event));
    if (isChanged || event.ctrlKey) event.preventDefault();
  }, { passive: false });
}

/** Drag zooms to a range; with Shift, the middle button or a finger it moves. */
function listenToDrag(element, timeAt, view, { onRange, onClick }) {
  let drag = null;
  element.addEventListener("pointerdown", (event) => {
    if (event.button > 1) return;
    const isMove = event.shiftKey || event.button === 1 || event.pointerType === "touch";
    drag = { x: event.clientX, time: timeAt(event), isMove, isFar: false };
    element.setPointerCapture(event.pointerId);
  });
  element.addEventListener("pointermove", (event) => {
    if (!drag) return;
    drag.isFar ||= Math.abs(event.clientX - drag.x) > 4;
    if (!drag.isFar) return;
    if (drag.isMove) view.moveBy(drag.time - timeAt(event));
    else onRange([drag.time, timeAt(event)].sort((a, b) => a - b));
  });
  const end = (event) => {
    if (!drag) return;
    const { isFar, isMove, time } = drag;
    drag = null;
    onRange(null);
    if (event.type === "pointercancel") return;
    if (!isFar) onClick(event);
    else if (!isMove) view.show(...[time, timeAt(event)].sort((a, b) => a - b));
  };
  element.addEventListener("pointerup", end);
  element.addEventListener("pointercancel", end);
  element.addEventListener("dblclick", () => view.fit());
}

/** Keys of the whole page; `actions` are those of the buttons. */
function listenToKeys(actions, view) {
  const keys = {
    "+": actions.in,
    "=": actions.in,
    "-": actions.out,
    "_": actions.out,
    "0": actions.fit,
    "[": actions.previous,
    "]": actions.next,
    Escape: actions.release,
    ArrowLeft: () => view.moveBy(-view.span() / 5),
    ArrowRight: () => view.moveBy(view.span() / 5),
  };
  const withShift = {
    ArrowLeft: () => actions.walk(-1, 0),
    ArrowRight: () => actions.walk(1, 0),
    ArrowUp: () => actions.walk(0, -1),
    ArrowDown: () => actions.walk(0, 1),
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest(".plot, pre")) return;
    const action = (event.shiftKey && withShift[event.key]) || keys[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}
