// What scrolls sideways can be reached by keyboard.
const scrolling = () => {
  for (const box of document.querySelectorAll("pre, .output, .table-wrapper")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
};
scrolling();
addEventListener("resize", scrolling);
addEventListener("toggle", scrolling, true);  // a fold that opens
