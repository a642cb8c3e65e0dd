// Package cli is the command line of Postrider, one file a command: flags, environment, help, output. Commands that only
// read or write a database do so here; what has to be wired (nodes, relays, folds) main hands in as a function. Errors
// are returned, with a hint where the reader can do something; main prints them and chooses the exit code. What came from
// runs, agents or a broker reaches a terminal only through clean, JSON output keeps it byte for byte.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"postrider/internal/record"
	"postrider/internal/sqlite"
)

// App is what all commands share. Main fills in the first group; the second is set before a command runs.
type App struct {
	Schema         string // schema.sql
	Stdin          io.Reader
	Stdout, Stderr io.Writer

	Log        *slog.Logger
	db, foldDB string
	tenant     string
	output     string

	logLevel, logFormat string
	foreign             []string // flags that mean nothing to the command that runs
	fromEnv             []string // flags that have their value from the environment

	help helpOutput
}

// helpOutput is where help goes. Cobra does not look at the error of writing it.
type helpOutput struct {
	io.Writer
	err error
}

func (h *helpOutput) Write(p []byte) (int, error) {
	n, err := h.Writer.Write(p)
	if h.err == nil {
		h.err = err
	}
	return n, err
}

// Execute runs the command that the arguments name.
func (a *App) Execute(ctx context.Context, root *cobra.Command) error {
	err := root.ExecuteContext(ctx)
	if errors.Is(err, sqlite.ErrForeign) && slices.Contains(a.fromEnv, "db") {
		hint := "POSTRIDER_DB names this database; --db FILE names another one"
		if other := HintOf(err); other != "" {
			hint = other + "; " + hint
		}
		err = WithHint(err, "%s", hint)
	}
	return errors.Join(err, a.help.err)
}

// UsageError: the command line is wrong, and nothing was done.
type UsageError struct{ Err error }

func (e *UsageError) Error() string { return e.Err.Error() }
func (e *UsageError) Unwrap() error { return e.Err }

// Usagef makes a UsageError.
func Usagef(format string, args ...any) error { return &UsageError{fmt.Errorf(format, args...)} }

type hinted struct {
	error
	hint string
}

func (h *hinted) Unwrap() error { return h.error }

// WithHint adds what the reader can do about err.
func WithHint(err error, format string, args ...any) error {
	return &hinted{err, fmt.Sprintf(format, args...)}
}

// HintOf is the outermost hint in err, or "".
func HintOf(err error) string {
	if h, ok := errors.AsType[*hinted](err); ok {
		return h.hint
	}
	return ""
}

// PrintError writes the line, and the line of the hint, that a failed command leaves on stderr.
func (a *App) PrintError(err error, hint string) {
	fmt.Fprintf(a.Stderr, "postrider: %s\n", clean(err.Error()))
	if hint != "" {
		fmt.Fprintf(a.Stderr, "hint: %s\n", clean(hint))
	}
}

const envPrefix = "POSTRIDER_"

// Root joins the commands under the flags that all of them take.
func (a *App) Root(commands ...*cobra.Command) *cobra.Command {
	root := &cobra.Command{
		Use:   "postrider",
		Short: "Runs agents and carries what they decided to the world over MQTT, also after days without a broker",
		Long: `Postrider runs agents on an edge or developer machine. Each step of a run (its new state, the input it consumed, all it
wants exported) is one SQLite transaction; a relay ships the committed records to an MQTT broker, whenever there is one;
a fold on the other side counts every record exactly once.

Every flag has an environment variable: POSTRIDER_ and its name in capitals, with _ for -, so POSTRIDER_DB for --db. Of a
flag that may be repeated, each line is one value. A flag on the command line wins.

Exit codes: 0 done, or stopped by a signal · 1 failure · 2 wrong usage · 3 not found, or a database that cannot be used ·
4 conflict · 5 node or broker unreachable · 6 refused for now, try later · 124 timeout.`,
		Example:           "  postrider dev --agent counter=exec:'python3 counter.py'\n  postrider send counter run-1 --data '{\"hello\": 1}'\n  postrider runs show run-1",
		Args:              a.noArgs,
		RunE:              func(c *cobra.Command, _ []string) error { return c.Help() },
		SilenceErrors:     true,
		SilenceUsage:      true,
		PersistentPreRunE: func(c *cobra.Command, _ []string) error { return a.prepare(c) },
	}
	root.SetIn(a.Stdin)
	a.help.Writer = a.Stdout
	root.SetOut(&a.help)
	root.SetErr(a.Stderr)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		if bad, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
			err = fmt.Errorf("--%s: %q is not %s", bad.GetFlag().Name, bad.GetValue(), wanted(bad.GetFlag()))
		}
		return WithHint(&UsageError{err}, "%s --help lists the flags", c.CommandPath())
	})
	f := root.PersistentFlags()
	f.StringVar(&a.db, "db", "postrider.db", "database `FILE`")
	f.StringVar(&a.tenant, "tenant", "default", "`NAME` of the tenant; where something is listed or counted, '' is all of them")
	f.StringVarP(&a.output, "output", "o", "table", "`FORM` of the output: table, json or jsonl")
	f.StringVar(&a.logLevel, "log-level", "info", "least `LEVEL` of log lines on stderr: debug, info, warn or error")
	f.StringVar(&a.logFormat, "log-format", "text", "`FORM` of log lines: text or json")
	cobra.EnableCommandSorting = false // they are listed in the order that main has them in
	root.AddCommand(commands...)
	root.AddCommand(a.completion(root))
	root.SetHelpCommand(a.helpCommand(root))
	settle(root)
	return root
}

// helpCommand is `help`. Cobra's own takes any word for a topic and is content.
func (a *App) helpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use:     "help [COMMAND]",
		Short:   "Show what a command does, as --help does",
		Example: "  postrider help runs tail",
		RunE: func(_ *cobra.Command, given []string) error {
			c, rest, err := root.Find(given)
			if err == nil && len(rest) > 0 {
				err = a.noArgs(c, rest)
			}
			if err != nil {
				return err
			}
			c.InitDefaultHelpFlag()
			return c.Help()
		},
	}
}

// wanted says what the value of a flag has to be.
func wanted(f *pflag.Flag) string {
	switch f.Value.Type() {
	case "bool":
		return "true or false"
	case "duration":
		return "a duration such as 5m"
	}
	return "a number that fits" // there are no others that refuse text
}

// environment takes flags that were not given from the environment.
func (a *App) environment(c *cobra.Command) (err error) {
	c.Flags().VisitAll(func(f *pflag.Flag) {
		name := envPrefix + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		value := os.Getenv(name)
		if err != nil || f.Changed || value == "" || f.Name == "help" || slices.Contains(a.foreign, f.Name) {
			return
		}
		values := []string{value}
		if _, repeated := f.Value.(pflag.SliceValue); repeated {
			values = strings.FieldsFunc(value, func(r rune) bool { return r == '\n' })
		}
		for _, v := range values {
			if c.Flags().Set(f.Name, v) != nil {
				err = Usagef("environment variable %s: %q is not %s", name, v, wanted(f))
				return
			}
		}
		a.fromEnv = append(a.fromEnv, f.Name)
	})
	return err
}

// given says that the command line itself has a flag: the environment speaks to other commands too.
func (a *App) given(c *cobra.Command, flag string) bool {
	return c.Flags().Changed(flag) && !slices.Contains(a.fromEnv, flag)
}

// prepare takes in the environment and checks the flags that all commands share.
func (a *App) prepare(c *cobra.Command) error {
	if completing(c) { // in the name of another command, whose flags are not known yet
		c.Root().SetErr(io.Discard)
		return nil
	}
	if err := a.environment(c); err != nil {
		return err
	}
	if f := c.Flags().Lookup("db"); f != nil && f.Value.String() == "" {
		return Usagef("--db: the name of a file is missing")
	}
	switch a.output {
	case "table", "json", "jsonl":
	default:
		return Usagef("--output: %q is not table, json or jsonl", a.output)
	}
	if a.tenant != "" {
		if err := record.CheckName(a.tenant); err != nil {
			return Usagef("--tenant or POSTRIDER_TENANT: %w", err)
		}
	}
	var o slog.HandlerOptions
	var level slog.Level
	if err := level.UnmarshalText([]byte(a.logLevel)); err != nil {
		return Usagef("--log-level: %q is not debug, info, warn or error", a.logLevel)
	}
	o.Level = level
	switch a.logFormat {
	case "text":
		a.Log = slog.New(slog.NewTextHandler(a.Stderr, &o))
	case "json":
		a.Log = slog.New(slog.NewJSONHandler(a.Stderr, &o))
	default:
		return Usagef("--log-format: %q is not text or json", a.logFormat)
	}
	return nil
}

// noArgs refuses arguments; of a command with subcommands, an argument is a subcommand that does not exist.
func (a *App) noArgs(c *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case !c.HasSubCommands():
		return Usagef("%s takes no argument; %q is one too many", c.CommandPath(), args[0])
	}
	err := Usagef("%s has no command %q", c.CommandPath(), args[0])
	c.SuggestionsMinimumDistance = 2
	if near := c.SuggestionsFor(args[0]); len(near) > 0 && near[0] != args[0] { // behind -- nothing is a command
		return WithHint(err, "did you mean %s?", strings.Join(near, " or "))
	}
	return WithHint(err, "%s --help lists the commands", c.CommandPath())
}

// without refuses flags that all commands have and that mean nothing to this one. It comes before the environment is looked
// at, which speaks to other commands.
func (a *App) without(next cobra.PositionalArgs, flags ...string) cobra.PositionalArgs {
	return func(c *cobra.Command, given []string) error {
		for _, name := range flags {
			if c.Flags().Changed(name) {
				return Usagef("%s takes no --%s", c.CommandPath(), name)
			}
		}
		a.foreign = flags
		return next(c, given)
	}
}

// args wants least to most arguments, which names are for the message.
func args(least int, names ...string) cobra.PositionalArgs {
	return func(c *cobra.Command, given []string) error {
		var err error
		switch {
		case len(given) < least:
			err = Usagef("%s: %s is missing", c.CommandPath(), names[len(given)])
		case len(given) > len(names):
			err = Usagef("%s: %q is one argument too many", c.CommandPath(), given[len(names)])
		case slices.Contains(given, ""): // an unset variable of a script
			err = Usagef("%s: %s is empty", c.CommandPath(), names[slices.Index(given, "")])
		default:
			return nil
		}
		return WithHint(err, "usage: %s", c.UseLine())
	}
}

// group is a command that is nothing without one of its subcommands.
func (a *App) group(c *cobra.Command, commands ...*cobra.Command) *cobra.Command {
	c.Args = a.noArgs
	c.RunE = func(c *cobra.Command, _ []string) error {
		var names []string
		for _, sub := range commands {
			names = append(names, sub.Name())
		}
		return Usagef("%s: a command is missing: %s", c.CommandPath(), strings.Join(names, ", "))
	}
	c.AddCommand(commands...)
	return c
}

// oneTenant is for commands that are about one run.
func (a *App) oneTenant() error {
	if a.tenant == "" {
		return Usagef("--tenant: a run has one; '' stands for all of them")
	}
	return nil
}

// patience bounds one look at a database: a reader that stays keeps the log of its writers growing.
const patience = time.Minute

// withNode opens an existing node database for one look or one write.
func (a *App) withNode(c *cobra.Command, readOnly bool, use func(ctx context.Context, store *sqlite.Store) error) error {
	ctx, cancel := context.WithTimeout(c.Context(), patience)
	defer cancel()
	log, say := holdBack(a.Log)
	store, err := sqlite.Open(ctx, a.db, sqlite.NodeSchema(a.Schema, "", a.db), sqlite.Options{ReadOnly: readOnly, Logger: log})
	if err != nil {
		return err
	}
	if err = errors.Join(use(ctx, store), store.Close()); err == nil {
		say()
	}
	return err
}
