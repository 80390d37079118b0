//! A language model of words: what follows the last two is drawn from what has followed them in the text it was
//! trained on, else what has followed the last one, else any word.

use std::collections::HashMap;

/// How often a context of two words is passed over for one of one, so that it does not only quote.
const SHORTER: u64 = 8;

pub struct Model {
    /// Each word with the space before it, once.
    words: Vec<String>,
    ids: HashMap<String, u32>,
    after_one: HashMap<u32, Vec<u32>>,
    after_two: HashMap<(u32, u32), Vec<u32>>,
}

impl Model {
    pub fn trained(texts: &[&str]) -> Model {
        let mut model =
            Model { words: Vec::new(), ids: HashMap::new(), after_one: HashMap::new(), after_two: HashMap::new() };
        for text in texts {
            let ids: Vec<u32> = prose(text).map(|word| model.id(word)).collect();
            for pair in ids.windows(2) {
                model.after_one.entry(pair[0]).or_default().push(pair[1]);
            }
            for three in ids.windows(3) {
                model.after_two.entry((three[0], three[1])).or_default().push(three[2]);
            }
        }
        model
    }

    pub fn words(&self) -> usize {
        self.words.len()
    }

    fn id(&mut self, word: &str) -> u32 {
        if let Some(id) = self.ids.get(word) {
            return *id;
        }
        let id = u32::try_from(self.words.len()).unwrap_or(u32::MAX);
        self.words.push(format!(" {word}"));
        self.ids.insert(word.into(), id);
        id
    }

    /// Words that follow the prompt, without end. The same seed gives the same ones.
    pub fn continued<'a>(&'a self, prompt: &str, seed: u64) -> impl Iterator<Item = &'a str> {
        let mut known = prompt.split_whitespace().rev().filter_map(|word| self.ids.get(word).copied());
        let mut last = known.next();
        let mut before = known.next();
        let mut draws = Draws(seed);
        std::iter::from_fn(move || {
            let two = before.zip(last).and_then(|pair| self.after_two.get(&pair));
            let two = two.filter(|_| !draws.next().is_multiple_of(SHORTER));
            let followers = two.or_else(|| self.after_one.get(&last?));
            let id = match followers {
                Some(list) => list[draws.below(list.len())],
                None => u32::try_from(draws.below(self.words.len())).unwrap_or(0),
            };
            (before, last) = (last, Some(id));
            self.words.get(usize::try_from(id).unwrap_or(usize::MAX)).map(String::as_str)
        })
    }
}

/// Sentences, without tables and what stands in fences.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    text.lines()
        .filter(move |line| {
            let fence = line.starts_with("```");
            fenced ^= fence;
            !fence && !fenced && !line.starts_with(['|', '#'])
        })
        .flat_map(str::split_whitespace)
}

/// splitmix64.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n.max(1) as u64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_what_it_has_read_and_the_same_for_the_same_seed() {
        let model = Model::trained(&["a lease is not a lock\n```\ncode\n```\n| a table |\nan attempt is not a retry"]);
        let said = |seed| model.continued("is", seed).take(50).collect::<String>();
        assert_eq!(said(7), said(7));
        assert!((0..20).map(said).collect::<std::collections::BTreeSet<_>>().len() > 1);
        assert!(said(7).starts_with(" not a"), "{}", said(7));
        assert!(!said(7).contains("code") && !said(7).contains('|'));
        assert_eq!(Model::trained(&[]).continued("x", 1).next(), None);
    }
}
