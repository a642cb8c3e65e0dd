package cli

import (
	"database/sql"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// Version is `version`.
func (a *App) Version() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the versions of Postrider, Go and SQLite",
		Example: "  postrider version -o json",
		Args:    a.without(a.noArgs, "db", "tenant"),
		RunE: func(c *cobra.Command, _ []string) error {
			own := "unknown"
			if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
				own = info.Main.Version
			}
			db, err := sql.Open("sqlite", ":memory:")
			if err != nil {
				return fmt.Errorf("ask SQLite for its version: %w", err)
			}
			defer db.Close()
			var lib string
			if err := db.QueryRowContext(c.Context(), "SELECT sqlite_version()").Scan(&lib); err != nil {
				return fmt.Errorf("ask SQLite for its version: %w", err)
			}
			if a.output != "table" {
				return a.printJSON(object("version", own, "go", runtime.Version(), "sqlite", lib))
			}
			return a.fields("postrider", own, "go", runtime.Version(), "sqlite", lib)
		},
	}
}
