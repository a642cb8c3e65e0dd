package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"postrider/fold"
	"postrider/internal/record"
	"postrider/internal/sqlite"
)

// Fold is what a fold process is told.
type Fold struct {
	DB         string
	Name       string // "": what the database says, or a new one
	Broker     string
	Topics     record.Topics
	Tenant     string // "": all
	Partitions []int
	Listen     string // host:port of metrics and health; "": nowhere
}

// errUnsound: a fold lacks records or has two contents for one.
var errUnsound = errors.New("not sound")

// Fold is `fold`; run subscribes.
func (a *App) Fold(run func(ctx context.Context, f Fold) error) *cobra.Command {
	var o Fold
	var partitions string
	c := &cobra.Command{
		Use:   "fold",
		Short: "Count every event of the nodes exactly once",
		Long: `Subscribe to the events of all nodes and keep each exactly once in a database, which is made when it is missing. Several
folds share the work by partition. --tenant limits a fold to one tenant.`,
		Example: "  postrider fold --broker tcp://broker:1883\n  postrider fold --broker tcp://broker:1883 --partitions 0-7 --name east --db east.db",
		Args:    a.noArgs,
	}
	c.PersistentFlags().StringVar(&a.foldDB, "db", "postrider.fold.db", "database `FILE` of the fold")
	c.Flags().StringVar(&o.Broker, "broker", "", "`URL` of the broker: tcp://, mqtt://, tls://, ws://, wss:// or host:port (required)")
	c.Flags().StringVar(&o.Name, "name", "", "`NAME` of the fold (default the host's name and a random suffix, kept in the database)")
	c.Flags().StringVar(&partitions, "partitions", "0-15", "`LIST` of the partitions to take, such as 0-3,7")
	c.Flags().StringVar(&o.Tenant, "tenant", "", "`NAME` of the only tenant to take (default all)")
	topicRoot(c.Flags(), &o.Topics)
	listen(c.Flags(), &o.Listen, "127.0.0.1:8422")
	c.RunE = func(c *cobra.Command, _ []string) (err error) {
		if o.Partitions, err = record.ParsePartitions(partitions); err != nil {
			return Usagef("--%w", err)
		}
		if o.Name != "" {
			if err := record.CheckName(o.Name); err != nil {
				return Usagef("--name: %w", err)
			}
		}
		if err := record.CheckRoot(o.Topics.Root); err != nil {
			return Usagef("--topic-root: %w", err)
		}
		if err := checkListen(&o.Listen); err != nil {
			return err
		}
		if o.Broker == "" {
			return Usagef("--broker URL is missing")
		}
		if o.Tenant != "" {
			if err := record.CheckName(o.Tenant); err != nil {
				return Usagef("--tenant: %w", err)
			}
		}
		o.DB = a.foldDB
		return run(c.Context(), o)
	}
	c.AddCommand(a.foldShow(), a.foldVerify())
	return c
}

func (a *App) withFold(c *cobra.Command, use func(ctx context.Context, f *fold.Fold) error) error {
	ctx, cancel := context.WithTimeout(c.Context(), patience)
	defer cancel()
	f, err := fold.Open(ctx, a.foldDB, fold.Options{Store: sqlite.Options{ReadOnly: true, Logger: a.Log}})
	if errors.Is(err, sqlite.ErrForeign) {
		if beside := foldBeside(a.foldDB); exists(beside) {
			err = WithHint(err, "the fold of a node of that name is in %s", beside)
		}
	}
	if errors.Is(err, sqlite.ErrNotFound) {
		err = WithHint(err, "postrider fold or postrider dev makes one; --db names it")
	}
	if err != nil {
		return err
	}
	return errors.Join(use(ctx, f), f.Close())
}

func (a *App) foldShow() *cobra.Command {
	var node string
	c := &cobra.Command{
		Use:               "show RUN",
		Short:             "Show a run's events as they arrived: the live lineage, in order, up to the first gap",
		Example:           "  postrider fold show run-1\n  postrider fold show run-1 --node line-1 -o json",
		Args:              args(1, "RUN"),
		ValidArgsFunction: a.completeFolded,
	}
	c.Flags().StringVar(&node, "node", "", "`NAME` of the run's node, where several have one of that name")
	c.RunE = func(c *cobra.Command, given []string) error {
		if err := a.oneTenant(); err != nil {
			return err
		}
		return a.withFold(c, func(ctx context.Context, f *fold.Fold) error {
			s, err := f.Show(ctx, a.tenant, given[0], node)
			if _, ok := errors.AsType[*fold.AmbiguousError](err); ok {
				return WithHint(&UsageError{err}, "--node NAME says which")
			}
			if errors.Is(err, fold.ErrNotFound) && node != "" {
				return elsewhere(ctx, f, a.tenant, given[0], err)
			}
			if errors.Is(err, fold.ErrNotFound) {
				return WithHint(err, "no event of it has arrived here: postrider outbox ls lists, on its node, what is not shipped yet; --tenant NAME names another tenant")
			}
			if err != nil {
				return err
			}
			switch a.output {
			case "json":
				return a.printJSON(s.AppendJSON(nil))
			case "jsonl":
				out := list{app: a}
				for i := range s.Records {
					if err := out.add(s.Records[i].AppendJSON(nil)); err != nil {
						return err
					}
				}
				return out.end()
			}
			if err := a.fields("tenant", s.Tenant, "node", s.Node, "run", s.Run, "branch", s.Branch, "lsn", number(s.LSN)); err != nil {
				return err
			}
			if err := a.blank(); err != nil {
				return err
			}
			rows := make([][]string, len(s.Records))
			for i, r := range s.Records {
				rows[i] = []string{number(r.LSN), r.Branch, r.Type, cut(string(r.Data), 200)}
			}
			return a.table([]string{"LSN", "BRANCH", "TYPE", "DATA"}, rows)
		})
	}
	return c
}

// elsewhere adds to err, that a run is not known of one node, of which nodes it is.
func elsewhere(ctx context.Context, f *fold.Fold, tenant, run string, err error) error {
	s, other := f.Show(ctx, tenant, run, "")
	if several, ok := errors.AsType[*fold.AmbiguousError](other); ok {
		return WithHint(err, "nodes with a run of that name: %s", strings.Join(several.Nodes, ", "))
	}
	if other == nil {
		return WithHint(err, "node %s has a run of that name", s.Node)
	}
	return err
}

func (a *App) foldVerify() *cobra.Command {
	return &cobra.Command{
		Use:   "verify",
		Short: "Say whether anything is missing or contradicts itself, in all tenants",
		Long: `Go through all that a fold holds. Exit code 1 when there are gaps, events parked behind a gap, or records that came with
two contents.`,
		Example: "  postrider fold verify -o json",
		Args:    a.without(a.noArgs, "tenant"),
		RunE: func(c *cobra.Command, _ []string) error {
			return a.withFold(c, func(ctx context.Context, f *fold.Fold) error {
				v, err := f.Verify(ctx)
				if err != nil {
					return err
				}
				if a.output != "table" {
					err = a.printJSON(appendJSON(nil, v))
				} else {
					err = a.verification(v)
				}
				if err == nil && !v.OK() {
					err = fmt.Errorf("fold %s is %w: %d gaps, %d parked, %d conflicts", a.foldDB, errUnsound, v.Gaps, v.Parked, v.Conflicts)
				}
				return err
			})
		},
	}
}

func (a *App) verification(v *fold.Verification) error {
	err := a.fields("runs", number(v.Runs), "records", number(v.Records), "duplicates", number(v.Duplicates), "gaps", number(v.Gaps),
		"parked", number(v.Parked), "conflicts", number(v.Conflicts), "holes", number(v.Holes), "abandoned", number(v.Abandoned),
		"malformed", number(v.Malformed))
	if err != nil || len(v.Findings) == 0 {
		return err
	}
	rows := make([][]string, len(v.Findings))
	for i, w := range v.Findings {
		lsn := number(w.LSN)
		if w.What == "gap" {
			lsn = number(w.Missing)
		}
		rows[i] = []string{w.What, w.Tenant, w.Node, w.Run, w.Branch, lsn}
	}
	if err := a.blank(); err != nil {
		return err
	}
	return a.table([]string{"WHAT", "TENANT", "NODE", "RUN", "BRANCH", "LSN"}, rows)
}

// foldBeside names the fold's database of dev.
func foldBeside(db string) string { return strings.TrimSuffix(db, ".db") + ".fold.db" }

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// hostName is the host's name as far as it can be a node's.
func hostName() string {
	host, err := os.Hostname()
	if err != nil {
		host = ""
	}
	host, _, _ = strings.Cut(host, ".")
	name := bytes.Map(func(r rune) rune {
		if record.CheckName(string(r)) == nil {
			return r
		}
		return '-'
	}, []byte(host))
	if len(name) == 0 {
		return "dev"
	}
	return string(name[:min(len(name), 64)])
}
