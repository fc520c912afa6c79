// The gallery's filters; without scripts all pictures are shown.
for (const button of document.querySelectorAll("[data-filter]")) {
  button.addEventListener("click", () => {
    for (const other of document.querySelectorAll("[data-filter]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    for (const item of document.querySelectorAll("#answers .gallery li")) {
      item.hidden = button.dataset.filter !== "all" && !item.classList.contains(button.dataset.filter);
    }
  });
}
