//! `leasehold completions`: from the same definition as `--help`.

use clap::{Args, CommandFactory as _, ValueEnum};
use clap_complete::aot::{Bash, Fish, Zsh, generate};

use super::{Cli, Failed};

/// Print completions for a shell
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  source <(leasehold completions bash)
  leasehold completions zsh > ~/.zfunc/_leasehold
  leasehold completions fish > ~/.config/fish/completions/leasehold.fish

Exit codes: 0 printed, 2 wrong usage.")]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

impl Completions {
    pub fn run(self) -> Result<(), Failed> {
        let mut text = Vec::new();
        let mut cli = Cli::command();
        match self.shell {
            Shell::Bash => generate(Bash, &mut cli, "leasehold", &mut text),
            Shell::Zsh => generate(Zsh, &mut cli, "leasehold", &mut text),
            Shell::Fish => generate(Fish, &mut cli, "leasehold", &mut text),
        }
        super::print_line(String::from_utf8_lossy(&text).trim_end())
    }
}
