//! The worst figure beside each bound.

use std::collections::BTreeMap;
use std::fmt;

use crate::checker::{Limits, PROMPT};

/// What was measured for one promise.
#[derive(Default)]
struct Figure {
    values: Vec<u64>,
    bound: u64,
    judged: usize,
}

pub struct Verdict {
    limits: Limits,
    figures: BTreeMap<&'static str, Figure>,
    pub terms: usize,
    pub violations: Vec<String>,
}

const HAND_OVER: &str = "P6 hand-over after a release";

impl Verdict {
    pub fn new(limits: &Limits) -> Verdict {
        Verdict { limits: *limits, figures: BTreeMap::new(), terms: 0, violations: Vec::new() }
    }

    /// A figure and its bound; beyond it is a violation.
    pub fn measure(
        &mut self,
        row: &'static str,
        value: u64,
        bound: u64,
        tell: &dyn Fn() -> String,
    ) {
        let figure = self.figures.entry(row).or_default();
        figure.values.push(value);
        figure.bound = figure.bound.max(bound);
        figure.judged += 1;
        if value > bound {
            self.violations.push(format!("{row}: {}", tell()));
        }
    }

    /// Something that was looked at and found in order, or reported as a violation elsewhere.
    pub fn note(&mut self, row: &'static str, times: usize) {
        self.figures.entry(row).or_default().judged += times;
    }

    pub fn count(&mut self, row: &'static str, value: usize) {
        let figure = self.figures.entry(row).or_default();
        figure.judged += 1;
        figure.values.push(value as u64);
    }

    /// Each within `bound`; the 99th percentile is judged by [`Verdict::finish`].
    pub fn hand_over(&mut self, value: u64, bound: u64, tell: &dyn Fn() -> String) {
        self.measure(HAND_OVER, value, bound, tell);
    }

    pub fn finish(&mut self) {
        for figure in self.figures.values_mut() {
            figure.values.sort_unstable();
        }
        let Some(figure) = self.figures.get(HAND_OVER) else { return };
        // One hand-over in a hundred is let off: with fewer there is no such percentile.
        if figure.values.len() >= 100 && figure.percentile(99) > PROMPT {
            let late = figure.percentile(99) / 1_000_000;
            self.violations.push(format!("{HAND_OVER}: one in a hundred takes {late} ms"));
        }
    }
}

impl Figure {
    fn percentile(&self, percent: usize) -> u64 {
        let last = self.values.len().saturating_sub(1);
        self.values.get(last * percent / 100).copied().unwrap_or(0)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |nanos: u64| format!("{:.1}", nanos as f64 / 1e6);
        let Limits { heartbeat, query, retry, ttl, .. } = self.limits;
        writeln!(
            f,
            "H {} ms, Q {} ms, R {} ms, T {} ms; {} terms",
            heartbeat / 1_000_000,
            query / 1_000_000,
            retry / 1_000_000,
            ttl / 1_000_000,
            self.terms
        )?;
        writeln!(
            f,
            "{:<40} {:>6} {:>9} {:>9} {:>9} {:>9}",
            "(ms)", "judged", "median", "p99", "worst", "bound"
        )?;
        for (row, figure) in &self.figures {
            if figure.values.is_empty() || figure.bound == 0 {
                let worst = figure.values.last().map_or("0".into(), |worst| ms(*worst));
                let bound = "0";
                writeln!(
                    f,
                    "{row:<40} {:>6} {:>9} {:>9} {worst:>9} {bound:>9}",
                    figure.judged, "", ""
                )?;
                continue;
            }
            let (median, late) = (ms(figure.percentile(50)), ms(figure.percentile(99)));
            let (worst, bound) = (ms(figure.percentile(100)), ms(figure.bound));
            writeln!(
                f,
                "{row:<40} {:>6} {median:>9} {late:>9} {worst:>9} {bound:>9}",
                figure.judged
            )?;
        }
        for violation in &self.violations {
            writeln!(f, "VIOLATION {violation}")?;
        }
        Ok(())
    }
}
