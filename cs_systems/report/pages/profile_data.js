// The recorded steps, from the JSON in the page. Names from the trace are set as text, never as HTML.
const started = performance.now();
const data = unpacked(byId("profile").textContent, true);
const { names, functions, places, steps } = data;
const median = steps.findIndex((step) => step.number === data.step.number);
const chosen = { step: median }; // the step that the icicle and the sums are of; null: all
const familyOf = (f) => data.families[names.family[functions.name[f]]];
const stepsChosen = () => (chosen.step === null ? steps : [steps[chosen.step]]);
const isChosen = (stream, i) => (chosen.step === null ? stream.step[i] >= 0 : stream.step[i] === chosen.step);
const chosenTime = () => stepsChosen().reduce((sum, step) => sum + step.kernel_ns, 0);
const chosenName = () => (chosen.step === null ? `all ${steps.length} steps` : `step ${steps[chosen.step].number}`);
function eachChosenKernel(use) {
  for (const stream of data.streams) for (let i = 0; i < stream.start.length; i++) if (isChosen(stream, i)) use(stream, i);
}

// Return the index of the first of the sorted times that is not before t.
function firstAtOrAfter(sorted, t) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < t) low = middle + 1;
    else high = middle;
  }
  return low;
}
const stepStarts = steps.map((step) => step.start_ns);
// Return the index of the step in which the host was at time t, or -1.
function stepAt(t) {
  const index = firstAtOrAfter(stepStarts, t + 1) - 1;
  return index >= 0 && t <= steps[index].start_ns + steps[index].wall_ns ? index : -1;
}
// Each stream gets `step`: the step that launched each kernel.
for (const stream of data.streams) {
  const { start, launch } = stream, step = (stream.step = new Int32Array(start.length));
  for (let i = 0; i < step.length; i++) step[i] = stepAt(launch[i] ?? start[i]);
}
