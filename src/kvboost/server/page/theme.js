// Light, dark, or as the system says. Runs before the first paint; the choice is all that this page stores.
"use strict";
{
  const STORED = "kvboost-theme";
  const CHOICES = ["system", "light", "dark"];

  const read = () => {
    try {
      return localStorage.getItem(STORED);
    } catch {
      return null; // storage is switched off: the choice lasts as long as the page
    }
  };

  const apply = (choice) => {
    document.documentElement.dataset.theme = choice;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${choice}`;
  };

  let choice = CHOICES.includes(read()) ? read() : "system";
  apply(choice);

  addEventListener("DOMContentLoaded", () => {
    apply(choice);
    document.getElementById("theme").addEventListener("click", () => {
      choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
      apply(choice);
      try {
        localStorage.setItem(STORED, choice);
      } catch {
        // as above
      }
    });
  });
}
