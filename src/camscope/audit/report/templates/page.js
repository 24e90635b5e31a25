"use strict";
const slide = document.querySelector(".slide"), opacity = document.getElementById("opacity");
if (slide && opacity) {
  slide.hidden = false;
  opacity.addEventListener("input", () => document.documentElement.style.setProperty("--heat", opacity.value));
}
