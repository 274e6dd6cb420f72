// What the dashboards use of the types that Grafana publishes: the root of grafana.json, which test_schema.py reads.
//
//     npm install @grafana/schema@11.6.0 older@npm:@grafana/schema@10.4.19 ts-json-schema-generator@2.4.0
//     npx ts-json-schema-generator --path grafana.ts --type Dashboard --no-type-check --jsDoc none --minify --out grafana.json
//
// in a copy of this folder. Both versions of @grafana/schema are Copyright Grafana Labs, under the Apache License 2.0
// (the text is /LICENSE); the newer one has no type of Prometheus' queries.
import type * as grafana from "@grafana/schema";
import type * as stat from "./node_modules/@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type * as table from "./node_modules/@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type * as timeseries from "./node_modules/@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";
import type { PrometheusDataQuery } from "./node_modules/older/dist/esm/raw/composable/prometheus/dataquery/x/PrometheusDataQuery_types.gen";

// Grafana fills in the options that a panel leaves out.
type Defaults<Custom> = Omit<grafana.FieldConfig, "custom"> & { custom?: Partial<Custom> };
type Fields<Custom> = Omit<grafana.FieldConfigSource, "defaults"> & { defaults: Defaults<Custom> };
type PanelOf<Type extends string, Options, Custom> =
  Omit<grafana.Panel, "type" | "targets" | "options" | "fieldConfig"> & {
    type: Type;
    targets: PrometheusDataQuery[];
    options?: Partial<Options>;
    fieldConfig?: Fields<Custom>;
  };
type Panel =
  | PanelOf<"stat", stat.Options, {}>
  | PanelOf<"table", table.Options, table.FieldConfig>
  | PanelOf<"timeseries", timeseries.Options, timeseries.FieldConfig>
  | (Omit<grafana.RowPanel, "panels"> & { panels: [] });
type Annotation = Omit<grafana.AnnotationQuery, "target"> & { target?: PrometheusDataQuery };

export type Dashboard = Omit<grafana.Dashboard, "panels" | "annotations"> & {
  panels: Panel[];
  annotations?: { list?: Annotation[] };
};
