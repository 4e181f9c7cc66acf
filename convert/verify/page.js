for (const compare of document.querySelectorAll(".compare")) {
  const stage = compare.querySelector(".stage");
  const slider = compare.querySelector("input");
  for (const picture of compare.parentElement.querySelectorAll("img.side")) {
    const copy = picture.cloneNode();
    copy.alt = "";
    stage.append(copy);
  }
  const show = () => {
    stage.style.setProperty("--at", `${slider.value}%`);
    slider.setAttribute("aria-valuetext", `${slider.value} % ${slider.dataset.left}`);
  };
  slider.addEventListener("input", show);
  show();
  compare.hidden = false;
}
